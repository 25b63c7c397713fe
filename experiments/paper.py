"""Train and measure what the paper compares: three drafts, six ablations, recipes, sweeps. Resumable: run it again.

    python experiments/paper.py --data TRAINING_TEXT [--data ...] --held-out TEXT_DIR     everything
    python experiments/paper.py --list                                                    what there is and is done
    python experiments/paper.py --only 'spire*' ...                                       some of it

Each cell trains with `spire train draft` and measures with `spire eval acceptance`, and writes one JSON file in
experiments/results/paper/. What is in a file is not measured again; an interrupted training goes on where it was.
`python experiments/report.py` turns the files into docs/results.md.
"""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from spire.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results" / "paper"
RUNS = ROOT / "runs" / "paper"
TARGET = ROOT / "models" / "target"
BUNDLED = ROOT / "models" / "draft"

# Steps of 2,048 tokens: what every SPIRe draft that is compared has seen, and those of a sweep over its shape.
STEPS, SWEPT_STEPS = 1000, 500
HEADLINE, SWEEP = 4096, 1024

# The paper's recipe: last layers, MixedLoss(0.5), blocks of k = 4. It names no optimizer: AdamW, at the rate that its
# schedule names for the target.
PAPER = {"optimizer": "adamw", "adamw-rate": 1e-3, "scale-input": False}

# The recipe that is compared with the paper's over three seeds: the cells' own, and these.
BETTER, OTHER_SEEDS = "on-policy", (1, 3)

# Two ablations, by name, whose order is not the paper's: both again on fewer tokens, over three seeds.
SWAPPED, FOLLOW_UP_SEEDS = ("hard", "activations"), (1, 2, 3)

console = Console(stderr=True)


@dataclass(frozen=True)
class Measurement:
    """One `spire eval acceptance`."""

    contexts: int = SWEEP
    context: int = 512
    k: int = 4
    temperature: float = 1.0


@dataclass(frozen=True)
class CellPlan:
    """A draft, how it is trained (None: not at all), and what is measured of it."""

    name: str
    what: str
    train: dict[str, Any] | None
    steps: int = STEPS
    seed: int = 2
    measurements: tuple[Measurement, ...] = (Measurement(),)
    draft: str = field(default="")

    @property
    def file(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def directory(self) -> Path:
        return RUNS / self.name

    def measured(self) -> list[dict[str, Any]]:
        """Measurements of this draft for the present target."""
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        return list(found["acceptance"]) if found.get("target") == target_fingerprint() else []

    def missing(self) -> list[Measurement]:
        done = [{name: cell[name] for name in asdict(Measurement())} for cell in self.measured()]
        return [measurement for measurement in self.measurements if asdict(measurement) not in done]


CONTEXTS = tuple(Measurement(contexts=SWEEP, context=context) for context in (256, 960, 1900))


def plan() -> list[CellPlan]:
    """Every cell, the most telling first."""
    compared = (Measurement(contexts=HEADLINE), *CONTEXTS, Measurement(k=8))
    cells = [
        CellPlan("spire", "SPIRe", {}, measurements=compared),
        CellPlan("vanilla", "vanilla", {"kind": "vanilla"}, steps=6000, measurements=compared),
        CellPlan("magicdec", "MagicDec", None, measurements=compared, draft="magicdec"),
        CellPlan("ablation-init", "random initialisation", {"init": "random", "scale-input": False}),
        CellPlan("ablation-omega-1", "ω = 1", {"omega": 1.0}),
        CellPlan("ablation-hard", "hard targets", {"loss": "data"}),
        CellPlan("ablation-feedback", "no feedback memory", {"feedback": False}),
        CellPlan("ablation-activations", "neither feedback nor activations", {"feedback": False, "activations": False}),
        CellPlan("ablation-dense", "dense cache", {"window": 2048}),
    ]
    swapped = {cell.name: cell for cell in cells if cell.name.removeprefix("ablation-") in SWAPPED}
    cells += [
        CellPlan(name.replace("ablation", "follow-up") + f"-seed-{seed}", cell.what, cell.train, SWEPT_STEPS, seed)
        for seed in FOLLOW_UP_SEEDS
        for name, cell in swapped.items()
    ]
    recipes: dict[str, tuple[str, dict[str, Any]]] = {
        "paper": ("the paper's, AdamW 1e-3", PAPER),
        "no-self-key": ("without the self-key", {"self-key": False}),
        "rollout-8": ("rollouts of 8", {"k": 8}),
        "log": ("−log α for −α", {"loss": "mixed-log"}),
        "anneal": ("ω from 1 to 0", {"omega": 1.0, "omega-final": 0.0}),
        "on-policy": ("half on-policy", {"on-policy": 0.5}),
        "layers-0-7": ("layers 1 and 8 for 7 and 8", {"copied-layers": "0,7"}),
        "frozen": ("frozen embeddings", {"freeze-embeddings": True}),
    }
    for name, (what, options) in recipes.items():
        again = (Measurement(contexts=HEADLINE),) if name in ("paper", BETTER) else ()
        cells.append(CellPlan(f"recipe-{name}", what, options, measurements=(Measurement(), *again)))
        cells += [
            CellPlan(f"recipe-{name}-seed-{seed}", what, options, seed=seed, measurements=again)
            for seed in OTHER_SEEDS
            if again
        ]
    cells += [CellPlan(f"tokens-{s}", f"{s * 2048 / 1e6:.1f} M tokens", {}, steps=s) for s in (SWEPT_STEPS, 250)]
    cells += [CellPlan(f"window-{w}", f"window {w}", {"window": w}, steps=SWEPT_STEPS) for w in (16, 32, 128, 256)]
    cells += [CellPlan(f"sink-{s}", f"sink {s}", {"sink": s}, steps=SWEPT_STEPS) for s in (0, 2, 4)]
    return cells


def main(
    data: Annotated[list[Path] | None, typer.Option(help="Training text, as for spire train.")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Directory of held-out text that contexts are cut from.")
    ] = None,
    valid: Annotated[Path | None, typer.Option(help="Text for the validation curve. Default: none.")] = None,
    only: Annotated[str, typer.Option(help="Names of cells, with wildcards; several with commas.")] = "*",
    as_list: Annotated[bool, typer.Option("--list", help="Show the cells and whether they are done.")] = False,
) -> None:
    """Run every cell that is not done yet."""
    chosen = [cell for cell in plan() if any(fnmatch.fnmatch(cell.name, pattern) for pattern in only.split(","))]
    if as_list:
        _show(chosen)
        return
    if not data or held_out is None:
        raise typer.BadParameter("--data and --held-out are needed to run something; --list shows what there is")
    failed: list[str] = []
    # The first measurement of every cell, then the others: an interruption leaves the most telling figures.
    for most in (1, None):
        for cell in chosen:
            if missing := [m for m in cell.measurements[:most] if m in cell.missing()]:
                console.rule(f"{cell.name}: {cell.what}")
                try:
                    _run(cell, missing, data, valid, held_out)
                except typer.Exit as failure:
                    console.print(f"{cell.name} failed, exit status {failure.exit_code}; going on with the next")
                    failed.append(cell.name)
    if failed:
        raise typer.Exit(1)


def _run(cell: CellPlan, measurements: list[Measurement], data: list[Path], valid: Path | None, held_out: Path) -> None:
    """Train, then measure. The file is written after each measurement: an interruption loses one."""
    if cell.train is not None:
        _train(cell, data, valid)
    for measurement in measurements:
        measured = _measure(cell, measurement, held_out)
        _write(cell, [*cell.measured(), measured])


def _write(cell: CellPlan, acceptance: list[dict[str, Any]]) -> None:
    result = {
        "name": cell.name,
        "what": cell.what,
        "train": cell.train,
        "steps": cell.steps if cell.train is not None else 0,
        "tokens": cell.steps * 2048 if cell.train is not None else 0,
        "seed": cell.seed,
        "target": target_fingerprint(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "validation": _validation(cell),
        "acceptance": acceptance,
    }
    write_whole(cell.file, lambda file: file.write_text(json.dumps(result, indent=1) + "\n"))


def _validation(cell: CellPlan) -> list[dict[str, Any]]:
    """τ against training tokens, as the training logged it."""
    log = cell.directory / "run" / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [figures for figures in map(json.loads, lines) if "valid_tau" in figures]


def _train(cell: CellPlan, data: list[Path], valid: Path | None) -> None:
    if (cell.directory / "model.safetensors").exists():
        return
    command = ["train", "draft", "--target", str(TARGET), "--out", str(cell.directory)]
    command += [part for path in data for part in ("--data", str(path))]
    command += ["--valid", str(valid)] if valid else []
    command += ["--steps", str(cell.steps), "--seed", str(cell.seed)]
    for option, value in (cell.train or {}).items():
        match value:
            case True:
                command.append(f"--{option}")
            case False:
                command.append(f"--no-{option}")
            case _:
                command += [f"--{option}", str(value)]
    run_spire(command)


def _measure(cell: CellPlan, measurement: Measurement, held_out: Path) -> dict[str, Any]:
    command = ["eval", "acceptance", "--model", str(TARGET), "--draft", cell.draft or str(cell.directory)]
    command += ["--data", str(held_out), "--contexts", str(measurement.contexts), "--context", str(measurement.context)]
    command += ["--k", str(measurement.k), "--temperature", str(measurement.temperature), "--json"]
    command += ["--rule", "rejection"]  # the paper's
    # A busy machine must not cost a round its draft: what is measured is acceptance, not time.
    extra = {"SPIRE_GATEWAY_DRAFT_DEADLINE": "60", "SPIRE_DRAFT_WAIT_MS": "20000"}
    (figures,) = json.loads(run_spire(command, extra))["acceptance"]
    return asdict(measurement) | figures


def target_fingerprint() -> str:
    """Return the bundled target's fingerprint, as its bundled draft knows it."""
    config = json.loads((BUNDLED / "config.json").read_text())
    fingerprint: str = config["spire_draft"]["target_fingerprint"]
    return fingerprint


def run_spire(arguments: list[str], extra: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "spire.cli", *arguments]
    console.print("spire " + " ".join(arguments), style="dim", highlight=False, soft_wrap=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | (extra or {}), check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return done.stdout


def _show(cells: list[CellPlan]) -> None:
    table = Table("cell", "what", "steps", "seed", "measured", box=None)
    for cell in cells:
        steps = "" if cell.train is None else str(cell.steps)
        done = len(cell.measurements) - len(cell.missing())
        table.add_row(cell.name, cell.what, steps, str(cell.seed), f"{done} of {len(cell.measurements)}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
