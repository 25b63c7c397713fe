"""A run as a short table: what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_HEADINGS = ("part", "what", "predicted", "measured", "", "")


def table(run: dict[str, Any]) -> str:
    """Columns as wide as they need to be, below a line that says what the figures belong to."""
    rows = [_HEADINGS, *_rows(run)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(["", _headline(run), "", *lines])


def _headline(run: dict[str, Any]) -> str:
    machine = run["machine"]
    versions = [f"{name} {machine[name]}" for name in ("driver", "cuda", "torch", "triton") if machine.get(name)]
    dry = ["DRY RUN on the CPU: tiny shapes, figures mean nothing"] if run["dry_run"] else []
    return " · ".join([*dry, f"card {machine['card']}", *versions, f"commit {run['commit']}", run["began"]])


def _rows(run: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for part in run["parts"]:
        number = str(part["part"])
        for found in part["findings"]:
            figures = _figure(found["predicted"]), _figure(found["measured"])
            yield number, found["what"], *figures, found["unit"], found["note"]
        if part["error"]:
            first, *rest = part["error"].splitlines()
            yield number, part["what"], "", part["status"], "", f"{first}: {rest[-1] if rest else ''}"[:100]


def _figure(value: float | int | bool | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
