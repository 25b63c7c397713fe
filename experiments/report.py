"""Write docs/results.md from the JSON of `experiments/paper.py`: `python experiments/report.py`. Runs nothing."""

from __future__ import annotations

import json
from statistics import fmean, stdev
from typing import Any

from paper import (
    BETTER,
    FOLLOW_UP_SEEDS,
    RESULTS,
    ROOT,
    STEPS,
    SWAPPED,
    SWEPT_STEPS,
    CellPlan,
    plan,
    target_fingerprint,
)

# Published τ at k = 4, temperature 1 (paper, Table 1 and Figure 5), ± 0.004.
PUBLISHED = {
    "vanilla": {960: 2.644, 512: 2.647, 256: 2.637},
    "magicdec": {960: 3.793, 512: 3.891, 256: 4.005},
    "spire": {960: 3.382, 512: 3.401, 256: 3.427},
    "ablation-init": {512: 3.105},
    "ablation-omega-1": {512: 3.375},
    "ablation-hard": {512: 3.069},
    "ablation-feedback": {512: 3.352},
    "ablation-activations": {512: 2.959},
}
MISSING = "not measured"

Cell = dict[str, Any]


def main() -> None:
    results = measured()
    file = ROOT / "docs" / "results.md"
    file.write_text(text(results, plan()))
    print(f"wrote {file.relative_to(ROOT)} from {len(results)} of {len(plan())} cells in {RESULTS.relative_to(ROOT)}")


def measured() -> dict[str, Cell]:
    """Each cell that was measured with the present target, by name."""
    return {cell.name: json.loads(cell.file.read_text()) for cell in plan() if cell.measured()}


def text(results: dict[str, Cell], cells: list[CellPlan]) -> str:
    return "\n".join(page(results, cells))


def page(results: dict[str, Cell], cells: list[CellPlan]) -> list[str]:
    """The lines of the whole page. What has not been measured says so."""
    names = {cell.name: cell.what for cell in cells}
    drafts = ("vanilla", "magicdec", "spire")
    ablations = [name for name in names if name.startswith("ablation-")]
    recipes = [name for name in names if name.startswith("recipe-") and "-seed-" not in name]
    return [
        "# Drafts, measured",
        "",
        "`python experiments/report.py` generates this page from the JSON files in `experiments/results/paper/`, which",
        "`python experiments/paper.py` makes. Do not edit the page. Every τ is the mean number of tokens a round",
        "through the real services, with its 95 % interval. Unless stated otherwise, the rule is rejection, the",
        "temperature is 1, k is 4, and 64 tokens are generated after each context of held-out text. The target is the",
        "bundled one (8.5 M parameters), which is far smaller and worse than the paper's (67 M). Compare orders and",
        "ratios, not absolute values.",
        "",
        f"The target's weights are in `models/target` (fingerprint {target_fingerprint()}). Each draft was trained for",
        "its row and is not kept. MagicDec has no weights of its own. The bundled draft is in no row, because its",
        "training was longer and different. Its figures are in [models/README.md](../models/README.md).",
        "",
        f"The budgets are equal: every SPIRe draft has seen {STEPS * 2048 / 1e6:.1f} M tokens unless its row says",
        "otherwise. The vanilla draft has seen as many tokens as the target. MagicDec is not trained. It was measured",
        "when its window still slid within a round. Now a pass of MagicDec also attends to the positions that would",
        "have left the window since the round began, at most k − 1.",
        "",
        "## The three drafts",
        "",
        *table(
            ["draft", "tokens", "steps", "seed", *(f"{c}: paper" for c in (256, 512, 960)), *_contexts(), "512, k = 8"],
            [_draft_row(name, names[name], results.get(name)) for name in drafts],
        ),
        *ratios(results),
        "## What each part of SPIRe gives, at context 512",
        "",
        *table(
            ["draft", "paper", "paper, against full", "ours", "ours, against full"],
            [_ablation_row(name, names[name], results) for name in ("spire", *ablations)],
        ),
        "### Follow-up: hard targets",
        "",
        "In the paper, the τ of hard targets is above the τ of the draft that has neither feedback nor activations",
        "(*neither*). In our measurements, it is below. Both drafts were trained again on half the tokens with three",
        "seeds. The order is not the chance of a seed, and more tokens do not change it (the last row). Hard targets",
        "teach a draft the text, but a draft has to guess the target, and a small target is farther from the text",
        "than a good one. Random initialisation and *neither* are equal within their intervals here.",
        "",
        *table(["tokens", "seed", "hard targets", "neither", "hard / neither"], _follow_up_rows(results)),
        "## Recipes",
        "",
        "The recipe of `spire` is Muon, scaled input, self-key, MixedLoss(0.5) and the last 2 layers. Each row but the",
        "first, which is the paper's recipe, changes one thing in it.",
        "",
        *table(
            ["recipe", "tokens", "seed", "τ at 512", "against spire"],
            [_recipe_row(n, names[n], results) for n in recipes],
        ),
        "### The better recipe, three seeds",
        "",
        "The table compares the paper's recipe (AdamW 1e-3) with the recipe of `spire` and one more change:",
        f"{names[f'recipe-{BETTER}']}.",
        "",
        *table(["seed", "the paper's", "better", "better / the paper's"], _seed_rows(results)),
        "Muon and the scaled input, which `spire` has and the paper's recipe has not, account for a factor of",
        f"{ratio(tau(results.get('spire')), tau(results.get('recipe-paper')))} of this gain. Training half on the",
        "target's own text accounts for a factor of",
        f"{ratio(tau(results.get(f'recipe-{BETTER}')), tau(results.get('spire')))} (seed 2).",
        "",
        "## Sweeps",
        "",
        f"The drafts differ in window or sink. Each was trained on {SWEPT_STEPS * 2048 / 1e6:.1f} M tokens:",
        "",
        *table(["cache", "τ at 512", "against window 64, sink 1"], _shape_rows(results, names)),
        "The recipe of `spire` by training tokens:",
        "",
        *table(["training tokens", "τ at 512"], _token_rows(results, names)),
    ]


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def tau(result: Cell | None, context: int = 512, k: int = 4) -> Cell | None:
    """The measurement with these settings, of several the one of most contexts."""
    cells = [c for c in (result["acceptance"] if result else []) if (c["context"], c["k"]) == (context, k)]
    return max(cells, key=lambda cell: int(cell["contexts"]), default=None)


def shown(cell: Cell | None) -> str:
    return f"{cell['tau']:.3f} ± {cell['tau_ci95']:.3f}" if cell else MISSING


def ratio(first: Cell | None, second: Cell | None) -> str:
    """first / second with the 95 % interval of independent measurements."""
    if not first or not second:
        return MISSING
    value = first["tau"] / second["tau"]
    relative = ((first["tau_ci95"] / first["tau"]) ** 2 + (second["tau_ci95"] / second["tau"]) ** 2) ** 0.5
    return f"{value:.3f} ± {value * relative:.3f}"


def ratios(results: dict[str, Cell]) -> list[str]:
    spire = tau(results.get("spire"))
    rows = []
    for name, paper in (("vanilla", 3.401 / 2.647), ("magicdec", 3.401 / 3.891)):
        rows.append([f"SPIRe / {name}", f"{paper:.3f}", ratio(spire, tau(results.get(name)))])
    return table(["at context 512", "paper", "ours"], rows)


def _contexts() -> list[str]:
    return [f"{context}: ours" for context in (256, 512, 960, 1900)]


def _draft_row(name: str, what: str, result: Cell | None) -> list[str]:
    budget = (
        [f"{result['tokens'] / 1e6:.1f} M", f"{result['steps']:,}", str(result["seed"])] if result else [MISSING] * 3
    )
    published = [f"{PUBLISHED[name][context]:.3f}" for context in (256, 512, 960)]
    ours = [shown(tau(result, context)) for context in (256, 512, 960, 1900)]
    return [what, *budget, *published, *ours, shown(tau(result, k=8))]


def _ablation_row(name: str, what: str, results: dict[str, Cell]) -> list[str]:
    full, published = tau(results.get("spire")), PUBLISHED.get(name, {}).get(512)
    paper = [f"{published:.3f}", f"{published / 3.401:.3f}"] if published else ["–", "–"]
    mine = tau(results.get(name))
    return [what, *paper, shown(mine), ratio(mine, full)]


def _follow_up_rows(results: dict[str, Cell]) -> list[list[str]]:
    rows, ratios = [["paper's", "", "3.069", "2.959", f"{3.069 / 2.959:.3f}"]], []
    for seed in FOLLOW_UP_SEEDS:
        hard, neither = (tau(results.get(f"follow-up-{name}-seed-{seed}")) for name in SWAPPED)
        rows.append([f"{SWEPT_STEPS * 2048 / 1e6:.1f} M", str(seed), shown(hard), shown(neither), ratio(hard, neither)])
        ratios += [hard["tau"] / neither["tau"]] if hard and neither else []
    hard, neither = (tau(results.get(f"ablation-{name}")) for name in SWAPPED)
    whole = [f"{STEPS * 2048 / 1e6:.1f} M", "2", shown(hard), shown(neither), ratio(hard, neither)]
    return [*rows, [f"{SWEPT_STEPS * 2048 / 1e6:.1f} M", "mean", "", "", _mean(ratios)], whole]


def _mean(ratios: list[float]) -> str:
    """Return the mean over three seeds and its 95 % interval (Student's t, two degrees of freedom)."""
    return f"{fmean(ratios):.3f} ± {4.303 * stdev(ratios) / 3**0.5:.3f}" if len(ratios) == 3 else MISSING


def _recipe_row(name: str, what: str, results: dict[str, Cell]) -> list[str]:
    result = results.get(name)
    if result is None:
        return [what, *[MISSING] * 4]
    mine = tau(result)
    return [
        what,
        f"{result['tokens'] / 1e6:.1f} M",
        str(result["seed"]),
        shown(mine),
        ratio(mine, tau(results.get("spire"))),
    ]


def _seed_rows(results: dict[str, Cell]) -> list[list[str]]:
    """Each seed's ratio, and the mean of them."""
    rows, gains = [], []
    for suffix, seed in (("-seed-1", 1), ("", 2), ("-seed-3", 3)):
        paper, better = (tau(results.get(f"recipe-{name}{suffix}")) for name in ("paper", BETTER))
        rows.append([str(seed), shown(paper), shown(better), ratio(better, paper)])
        gains += [better["tau"] / paper["tau"]] if better and paper else []
    return [*rows, ["mean", "", "", _mean(gains)]]


def _shape_rows(results: dict[str, Cell], names: dict[str, str]) -> list[list[str]]:
    base = tau(results.get(f"tokens-{SWEPT_STEPS}"))
    swept = [name for name in names if name.startswith(("window-", "sink-"))]
    rows = [[names[name], shown(tau(results.get(name))), ratio(tau(results.get(name)), base)] for name in swept]
    return [["window 64, sink 1", shown(base), "1"], *rows]


def _token_rows(results: dict[str, Cell], names: dict[str, str]) -> list[list[str]]:
    """The recipe of `spire` by what it has seen."""
    swept = [name for name in names if name.startswith("tokens-")]
    rows = [[names[name], shown(tau(results.get(name)))] for name in swept]
    rows.append([f"{STEPS * 2048 / 1e6:.1f} M tokens", shown(tau(results.get("spire")))])
    return sorted(rows, key=lambda row: float(row[0].split()[0]))


if __name__ == "__main__":
    main()
