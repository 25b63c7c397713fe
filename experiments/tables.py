"""Print the README's figures as Markdown from the recorded JSON: `python experiments/tables.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"


def main() -> None:
    tau = read(ROOT / "models" / "draft" / "acceptance.json", "acceptance")
    cells = [cell for name in ("bench", "bench_1900") for cell in read(RESULTS / f"{name}.json", "bench")]
    print(table(["context", "contexts", "τ, 95 %", "prefix of 1 · 2 · 3 · 4 accepted"], [tau_row(c) for c in tau]))
    headings = ["context", "requests", "plain", "k = 4", "gain", "predicted", "end to end, plain", "end to end, k = 4"]
    pairs = zip(cells[0::2], cells[1::2], strict=True)
    print(table(headings, [throughput_row(plain, drafted) for plain, drafted in pairs]))
    parts = ["draft", "verify", "sample", "waits for activations", "wire", "gateway", "overhead"]
    print(table(["context", "k", *parts], [split_row(cell) for cell in cells if cell["concurrency"] == 16]))


def read(file: Path, key: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(file.read_text())[key]
    return cells


def tau_row(cell: dict[str, Any]) -> list[str]:
    prefix = " · ".join(f"{share:.2f}" for share in cell["prefix_acceptance"])
    return [f"{cell['context']:,}", str(cell["contexts"]), f"{cell['tau']:.3f} ± {cell['tau_ci95']:.3f}", prefix]


def throughput_row(plain: dict[str, Any], drafted: dict[str, Any]) -> list[str]:
    decode, whole = "decode_tokens_per_second", "end_to_end_tokens_per_second"
    gains = [f"{gain:.2f} ×" for gain in (drafted[decode] / plain[decode], predicted(drafted))]
    rates = [plain[decode], drafted[decode], plain[whole], drafted[whole]]
    shown = [f"{rate:,.0f}" for rate in rates]
    return [f"{plain['context']:,}", str(plain["concurrency"]), *shown[:2], *gains, *shown[2:]]


def predicted(cell: dict[str, Any]) -> float:
    """The performance model's gain, from what microbenchmarks measured on the machine of the bench."""
    command = [sys.executable, "-m", "spire.cli", "perf-model", "--target", "bundled", "--json", "--k", str(cell["k"])]
    command += ["--hardware", str(RESULTS / "calibration.json")]
    command += ["--batch", str(cell["concurrency"]), "--context", str(cell["context"])]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    gain: float = report["drafts"][0]["multiplier"]
    return gain


def split_row(cell: dict[str, Any]) -> list[str]:
    parts = ("propose", "verify_forward", "verify_sample", "draft_wait", "wire", "gateway")
    times = [f"{cell['round_ms'][part]:.1f}" for part in parts]
    return [f"{cell['context']:,}", str(cell["k"]), *times, f"{cell['overhead']:.1%}"]


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
