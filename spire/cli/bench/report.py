"""Tables of `spire bench`: throughput, latency, the parts of a round, and the machine. Each table fits 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spire.bench.cell import Cell, chosen_depths
from spire.errors import SpireError
from spire.perf import plots

# Parts of a round by column. The column "other" shows further parts that a gateway reports.
_PARTS = {
    "draft": ("propose",),
    "verify": ("verify_forward",),
    "sample": ("verify_sample",),
    "waits": ("draft_wait", "verify_queue"),
    "wire": ("wire",),
    "gateway": ("gateway",),
}
_UNKNOWN = "–"

Columns = dict[str, Callable[[Cell], str]]


def show(cells: list[Cell], target: str) -> None:
    """Print the tables of each system and draft, then remarks."""
    console = Console(highlight=False)
    console.print(f"target: {target}")
    for (system, draft), group in groupby(cells, key=lambda cell: (cell.system, cell.draft)):
        for table in _tables(system if draft is None else f"draft {draft}", list(group)):
            console.print(table)
    for line in _remarks(cells):
        console.print(line)


def plot(directory: Path, cells: list[Cell]) -> Path:
    """Plot measured beside modelled multipliers. Raises SpireError without matplotlib or without a multiplier."""
    panels: dict[str, list[tuple[str, float | None, float | None]]] = {}
    for cell in cells:
        if cell.draft is not None and cell.k != 0 and cell.multiplier_measured:
            panel = panels.setdefault(f"{cell.draft}, k = {cell.k}", [])
            modelled = cell.modelled.get("multiplier_modelled")
            panel.append((f"L {cell.context}\nB {cell.batch}", cell.multiplier_measured, modelled))
    if not panels:
        raise SpireError("--plot: no depth above 0 was measured beside k = 0 with all requests decoding")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "bench.png"
    synthetic = ", SYNTHETIC acceptance" if any(cell.synthetic for cell in cells) else ""
    plots.write_multipliers(file, f"decode throughput over k = 0 of the same run{synthetic}", panels)
    return file


def _tables(name: str, cells: list[Cell]) -> Iterator[Table]:
    if cells[0].draft is None:
        yield _table(name, _OTHERS, cells)
        return
    synthetic = " — SYNTHETIC acceptance" if cells[0].synthetic else ""
    yield _table(f"{name}{synthetic}: tokens per second", _THROUGHPUT, cells)
    yield _table(f"{name}{synthetic}: latency, ms", _LATENCY, cells)
    if any(cell.figures.round_ms for cell in cells):
        when = "" if cells[0].trace else " while all decode"
        yield _table(f"{name}{synthetic}: a mean round{when}, ms", _split(cells), cells)
    if any(cell.figures.busy or cell.figures.peak_memory_bytes for cell in cells):
        yield _table(f"{name}{synthetic}: the machine", _MACHINE, cells)


def _table(title: str, columns: Columns, cells: list[Cell]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for cell in cells:
        table.add_row(*(column(cell) for column in columns.values()))
    return table


def _remarks(cells: list[Cell]) -> Iterator[str]:
    if any(cell.figures.decode_tokens_per_second is None for cell in cells if cell.batch):
        yield f"decode {_UNKNOWN}: the first request had ended before the last one was in a round"
    measured = [cell for cell in cells if cell.figures.split_adds_up is not None]
    if off := [cell for cell in measured if not cell.figures.split_adds_up]:
        named = ", ".join(f"{c.draft} k={c.k} {c.batch}×{c.context} {c.figures.split_covers:.0%}" for c in off)
        yield f"parts of a round that miss the round the clients see by more than 5 %: {named}"
    elif measured:
        yield "the parts of every round add up to the round the clients see, within 5 %"
    for choice in chosen_depths(cells):
        interval = " ({:.2f}–{:.2f})".format(*choice.ci95) if choice.ci95 else ""
        what = f"{choice.draft} {choice.batch}×{choice.context}, best fixed k = {choice.best_k}"
        yield f"auto over the best fixed k: {what}: {choice.ratio:.2f} ×{interval}"
    for cell in cells:
        if lost := {reason: count for reason, count in (cell.figures.fallbacks or {}).items() if count}:
            told = ", ".join(f"{count:g} {reason}" for reason, count in lost.items())
            what = f"{cell.draft} k={cell.k} {cell.batch}×{cell.context}"
            yield f"blocks decoded plainly for want of a draft: {what}: {told}"
    yield from dict.fromkeys(f"{cell.system}: {cell.note}" for cell in cells if cell.note)


def _number(value: float | None, digits: int = 0) -> str:
    return _UNKNOWN if value is None else f"{value:,.{digits}f}"


def _milliseconds(value: float | None) -> str:
    """Format milliseconds with about three significant digits."""
    return _number(value, 0 if value and value >= 100 else 1 if value and value >= 10 else 2)


def _spread(cell: Cell) -> str:
    runs = cell.decode_runs
    return f"{min(runs):.0f}–{max(runs):.0f}" if runs else _UNKNOWN


def _interval(cell: Cell) -> str:
    return "{:.2f}–{:.2f}".format(*interval) if (interval := cell.multiplier_ci95) and cell.k != 0 else _UNKNOWN


def _part(names: tuple[str, ...], cell: Cell) -> str:
    split = cell.figures.round_ms
    return _milliseconds(None if split is None else sum(split.get(name, 0.0) for name in names))


def _split(cells: list[Cell]) -> Columns:
    """Return the columns of the mean round: its parts, their sum, and the round time that clients saw."""
    known = {name for names in _PARTS.values() for name in names}
    others = {name for cell in cells for name in cell.figures.round_ms or ()} - known
    parts = _PARTS | {"other": tuple(others)} if others else _PARTS
    columns: Columns = {"L": _WHAT["context"], "B": _WHAT["B"], "k": _WHAT["k"]}
    columns |= {heading: partial(_part, names) for heading, names in parts.items()}
    columns["sum"] = lambda cell: _milliseconds(cell.figures.round_total_ms)
    columns["seen"] = lambda cell: _milliseconds(cell.figures.round_ms_seen)
    return columns


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


_WHAT: Columns = {
    "context": lambda cell: _number(cell.context) if cell.trace is None else "trace",
    "B": lambda cell: _number(cell.batch),
    "k": lambda cell: _UNKNOWN if cell.k is None else str(cell.k),
}
_THROUGHPUT: Columns = _WHAT | {
    "decode": lambda cell: _number(cell.figures.decode_tokens_per_second, 1),
    "min–max": _spread,
    "× plain": lambda cell: _number(cell.multiplier_measured, 2),
    "95 %": _interval,
    "modelled": lambda cell: _number(cell.modelled.get("multiplier_modelled"), 2),
    "end to end": lambda cell: _number(cell.figures.end_to_end_tokens_per_second, 1),
    "× its plain": lambda cell: _number(cell.multiplier_end_to_end, 2),
}
_LATENCY: Columns = _WHAT | {
    "first token p50": lambda cell: _number(cell.figures.time_to_first_token_ms_p50),
    "p99": lambda cell: _number(cell.figures.time_to_first_token_ms_p99),
    "later p50": lambda cell: _number(cell.figures.inter_token_ms_p50, 1),
    " p99": lambda cell: _number(cell.figures.inter_token_ms_p99, 1),
    "τ": lambda cell: _number(cell.figures.tau, 2),
    "mean k": lambda cell: _number(cell.figures.mean_k, 2),
}
_OTHERS: Columns = {
    **{name: _THROUGHPUT[name] for name in ("context", "B", "decode", "min–max")},
    "× our plain": _THROUGHPUT["× plain"],
    "end to end": _THROUGHPUT["end to end"],
    **{name: _LATENCY[name] for name in ("first token p50", "later p50")},
    "p99": _LATENCY[" p99"],
    "τ": _LATENCY["τ"],
}
_MACHINE: Columns = _WHAT | {
    "verifier busy": lambda cell: _percent((cell.figures.busy or {}).get("verifier")),
    "draft busy": lambda cell: _percent((cell.figures.busy or {}).get("draft")),
    "outside models": lambda cell: _number(cell.figures.overhead and 100 * cell.figures.overhead, 1) + " %",
    "peak MB": lambda cell: _number(cell.figures.peak_memory_bytes and cell.figures.peak_memory_bytes / 1e6),
    "Δt": lambda cell: _number(cell.delta_t, 2),
    "Δt modelled": lambda cell: _number(cell.modelled.get("delta_t_modelled"), 2),
    "draft B/seq": lambda cell: _number(cell.figures.draft_state_bytes_per_sequence),
}
