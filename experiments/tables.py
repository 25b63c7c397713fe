"""Print the README's figures as Markdown from the recorded JSON: `python experiments/tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"

Cell = dict[str, Any]


def main() -> None:
    tau = read(ROOT / "models" / "draft" / "acceptance.json", "acceptance")
    cells = read(RESULTS / "bench.json", "bench")
    print(table(["context", "contexts", "τ, 95 %", "prefix of 1 · 2 · 3 · 4 accepted"], [tau_row(c) for c in tau]))
    headings = [
        "system",
        "context",
        "requests",
        "k",
        "decode",
        "gain",
        "modelled",
        "end to end",
        "first token, ms",
        "τ",
    ]
    print(table(headings, [throughput_row(cell) for cell in cells]))
    parts = ["draft", "verify", "sample", "waits", "wire", "gateway", "sum of seen", "overhead"]
    split = [split_row(cell) for cell in cells if cell["batch"] == 16 and cell["round_ms"]]
    print(table(["draft", "context", "k", *parts], split))


def read(file: Path, key: str) -> list[Cell]:
    cells: list[Cell] = json.loads(file.read_text())[key]
    return cells


def tau_row(cell: Cell) -> list[str]:
    prefix = " · ".join(f"{share:.2f}" for share in cell["prefix_acceptance"])
    return [f"{cell['context']:,}", str(cell["contexts"]), f"{cell['tau']:.3f} ± {cell['tau_ci95']:.3f}", prefix]


def throughput_row(cell: Cell) -> list[str]:
    gains = [shown(cell[name], "{:.2f} ×") for name in ("multiplier_measured", "multiplier_modelled")]
    rates = [shown(cell[f"{name}_tokens_per_second"], "{:,.0f}") for name in ("decode", "end_to_end")]
    what = [cell["draft"] or cell["system"], shown(cell["context"], "{:,}"), str(cell["batch"]), shown(cell["k"], "{}")]
    first = shown(cell["time_to_first_token_ms_p50"], "{:,.0f}")
    return [*what, rates[0], *gains, rates[1], first, shown(cell["tau"], "{:.2f}")]


def split_row(cell: Cell) -> list[str]:
    split = cell["round_ms"]
    waits = split["draft_wait"] + split["verify_queue"]
    parts = [split["propose"], split["verify_forward"], split["verify_sample"], waits, split["wire"], split["gateway"]]
    what = [cell["draft"], f"{cell['context']:,}", str(cell["k"])]
    return [
        *what,
        *(f"{ms:.1f}" for ms in parts),
        shown(cell["split_covers"], "{:.0%}"),
        shown(cell["overhead"], "{:.1%}"),
    ]


def shown(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
