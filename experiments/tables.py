"""Print the figures of README and docs/speed.md as Markdown from the recorded JSON.

python experiments/tables.py
python experiments/tables.py experiments/results/float32
python experiments/tables.py --chats experiments/results/amx/smollm2_chats
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"

Cell = dict[str, Any]


def main(
    results: Annotated[Path, typer.Argument(help="Where bench.json and peers.json are.")] = RESULTS,
    chats: Annotated[
        Path | None, typer.Option(help="Only the outputs of spire bench --chats in this directory.")
    ] = None,
) -> None:
    """τ of the bundled draft, gains by load, where a round goes, and peers."""
    if chats:
        print(chat_table(chats))
        return
    tau = read(ROOT / "models" / "draft" / "acceptance.json", "acceptance")
    cells, beside = (read(results / f"{name}.json", "bench") for name in ("bench", "peers"))
    print(table(["context", "contexts", "τ, 95 %", "prefix of 1 · 2 · 3 · 4 accepted"], [tau_row(c) for c in tau]))
    gains = ["gain", "modelled", "best fixed k", "its gain", "auto / best fixed", "end to end", "τ"]
    print(table(["context", "requests", "plain", "auto", *gains], [load_row(same) for same in loads(cells)]))
    depths = list(dict.fromkeys(cell["k"] for cell in cells))
    headings = ["context", "requests", *map(name_of_depth, depths)]
    print(table(headings, [depth_row(same, depths) for same in loads(cells)]))
    parts = ["draft", "verify", "sample", "waits", "wire", "gateway", "sum of seen", "overhead"]
    split = [c for c in cells if c["batch"] == 16 and c["k"] in (0, 4, 8) and c["round_ms"]]
    print(table(["context", "k", *parts], [split_row(cell) for cell in split]))
    batches = sorted({cell["batch"] for cell in beside})
    rows = {name_of(cell): None for cell in beside}
    print(table(["system", *(f"{batch} at once" for batch in batches)], [peer_row(n, batches, beside) for n in rows]))


def chat_table(directory: Path) -> str:
    """Return the gain of the gateway's own choice of k by temperature and load, from `spire bench --json`."""
    gains = ["gain, 95 %", "modelled", "over the best fixed k, 95 %", "mean k", "τ", "end to end"]
    rows = []
    for file in directory.glob("*.json"):
        found = json.loads(file.read_text())
        over_fixed = {(choice["context"], choice["batch"]): choice for choice in found["auto"]}
        for same in loads(found["bench"]):
            by_k = {cell["k"]: cell for cell in same}
            key = found["temperature"], same[0]["context"], same[0]["batch"]
            rows.append((key, chat_row(by_k[0], by_k["auto"], over_fixed.get(key[1:]))))
    headings = ["temperature", "context", "requests", "turns", "plain", "auto", *gains]
    return table(headings, [[f"{key[0]:g}", *row] for key, row in sorted(rows)])


def chat_row(plain: Cell, auto: Cell, over_fixed: dict[str, Any] | None) -> list[str]:
    best = ""
    if over_fixed:
        best = with_interval(over_fixed["ratio"], over_fixed["ci95"]) + f", k = {over_fixed['best_k']}"
    return [
        f"{plain['context']:,}",
        *(str(plain[name]) for name in ("batch", "runs")),
        *(shown(cell["decode_tokens_per_second"], "{:,.0f}") for cell in (plain, auto)),
        with_interval(auto["multiplier_measured"], auto["multiplier_ci95"]),
        shown(auto["multiplier_modelled"], "{:.2f} ×"),
        best,
        shown(auto["mean_k"], "{:.1f}"),
        shown(auto["tau"], "{:.2f}"),
        shown(auto["multiplier_end_to_end"], "{:.2f} ×"),
    ]


def with_interval(ratio: float, ci95: list[float] | None) -> str:
    """A ratio with its 95 % interval, which few turns do not have."""
    return f"{ratio:.2f} ×" + (f" ({ci95[0]:.2f}–{ci95[1]:.2f})" if ci95 else "")


def loads(cells: list[Cell]) -> list[list[Cell]]:
    """The cells of each context and batch."""
    keys = dict.fromkeys((cell["context"], cell["batch"]) for cell in cells)
    return [[cell for cell in cells if (cell["context"], cell["batch"]) == key] for key in keys]


def load_row(same: list[Cell]) -> list[str]:
    """Plain decoding, the gateway's own choice of k, and the best k of those that were fixed."""
    by_k = {cell["k"]: cell for cell in same}
    plain, auto = by_k[0], by_k["auto"]
    # A depth with a run whose requests never decoded all at once has no rate.
    fixed = [cell for cell in same if cell["k"] != "auto" and cell["decode_tokens_per_second_runs"]]
    best = max(fixed, key=lambda cell: cell["decode_tokens_per_second"])
    end_to_end = auto["end_to_end_tokens_per_second"] / plain["end_to_end_tokens_per_second"]
    return [
        f"{plain['context']:,}",
        str(plain["batch"]),
        *(shown(cell["decode_tokens_per_second"], "{:,.0f}") for cell in (plain, auto)),
        *(shown(auto[name], "{:.2f} ×") for name in ("multiplier_measured", "multiplier_modelled")),
        *((str(best["k"]), f"{best['multiplier_measured']:.2f} ×") if auto["multiplier_measured"] else ("", "")),
        "{:.2f} ± {:.2f}".format(*share_of_best(auto, fixed)) if auto["multiplier_measured"] else "",
        f"{end_to_end:.2f} ×",
        shown(auto["tau"], "{:.2f}"),
    ]


def depth_row(same: list[Cell], depths: list[int | str]) -> list[str]:
    """Tokens a second while all decode at each depth that was run."""
    rates = {cell["k"]: cell["decode_tokens_per_second"] for cell in same}
    first = [f"{same[0]['context']:,}", str(same[0]["batch"])]
    return first + [shown(rates.get(k), "{:,.0f}") for k in depths]


def share_of_best(auto: Cell, fixed: list[Cell]) -> tuple[float, float]:
    """Tokens a second with the gateway's own choice of k over those with the best fixed k, and a 95 % interval's half.

    A random half of the repeats decides which k is best, the other half is compared: of depths that hardly differ the
    best of all repeats is the luckiest, and what is as good would seem worse. The interval resamples repeats.
    """
    rng, (ours, *theirs) = random.Random(0), [cell["decode_tokens_per_second_runs"] for cell in (auto, *fixed)]
    repeats = range(min(map(len, (ours, *theirs))))

    def over_best(deciding: list[int], compared: list[int]) -> float:
        best = max(theirs, key=lambda runs: trimmed_mean([runs[at] for at in deciding]))
        return trimmed_mean([ours[at] for at in compared]) / trimmed_mean([best[at] for at in compared])

    halves = [rng.sample(repeats, len(repeats)) for _ in range(400)]
    middle = len(repeats) // 2
    estimate = fmean(over_best(half[:middle], half[middle:]) for half in halves)
    resampled = [over_best(list(repeats), rng.choices(repeats, k=len(repeats))) for _ in range(400)]
    return estimate, 1.96 * stdev(resampled)


def trimmed_mean(values: list[float]) -> float:
    """Without the highest and the lowest tenth: a run that the machine held up says nothing."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])


def name_of(cell: Cell) -> tuple[str, str]:
    if cell["draft"] is None:
        return cell["system"], ""
    depth = name_of_depth(cell["k"])
    return (depth, "") if cell["k"] == 0 else (cell["draft"], depth)


def name_of_depth(k: int | str) -> str:
    return {0: "plain", "auto": "auto"}.get(k, f"k = {k}")


def peer_row(name: tuple[str, str], batches: list[int], cells: list[Cell]) -> list[str]:
    """Tokens a second while all decode, by batch. Plain decoding is measured beside each draft: the first is shown."""
    by_batch: dict[int, Cell] = {}
    for cell in cells:
        if name_of(cell) == name:
            by_batch.setdefault(cell["batch"], cell)
    rates = (by_batch[b]["decode_tokens_per_second"] if b in by_batch else None for b in batches)
    return [" ".join(name).strip(), *(shown(rate, "{:,.0f}") for rate in rates)]


def read(file: Path, key: str) -> list[Cell]:
    cells: list[Cell] = json.loads(file.read_text())[key]
    return cells


def tau_row(cell: Cell) -> list[str]:
    prefix = " · ".join(f"{share:.2f}" for share in cell["prefix_acceptance"])
    return [f"{cell['context']:,}", str(cell["contexts"]), f"{cell['tau']:.3f} ± {cell['tau_ci95']:.3f}", prefix]


def split_row(cell: Cell) -> list[str]:
    split = cell["round_ms"]
    waits = split["draft_wait"] + split["verify_queue"]
    parts = [split["propose"], split["verify_forward"], split["verify_sample"], waits, split["wire"], split["gateway"]]
    what = [f"{cell['context']:,}", str(cell["k"])]
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
    typer.run(main)
