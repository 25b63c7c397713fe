"""Make what is modelled in a bench of the bundled pair anew, from the calibration beside it.

    python experiments/predict.py [DIR]

For a performance model that has changed since: what was measured stays. DIR (experiments/results) holds bench.json and
calibration.json, as experiments/first_light.sh leaves them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from spire.bench.prediction import PairModel
from spire.cli.paths import BUNDLED
from spire.perf import calibration
from spire.perf.hardware import Hardware

RESULTS = Path(__file__).parent / "results"


def main(results: Annotated[Path, typer.Argument(help="Where bench.json and calibration.json are.")] = RESULTS) -> None:
    file = results / "bench.json"
    report = json.loads(file.read_text())
    hardware = calibration.load(results / "calibration.json").hardware
    for cell in report["bench"]:
        if cell["multiplier_modelled"] is not None:
            cell |= modelled(cell, hardware)
    file.write_text(laid_out(report) + "\n")


def laid_out(report: dict) -> str:
    """As `spire bench --json` prints it, with a list of numbers on a line of its own."""
    text = json.dumps(report, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text)


def modelled(cell: dict, hardware: Hardware) -> dict:
    """As `spire bench` does: at the mean of the positions that a request comes to have."""
    generated = round(cell["generated"] / cell["requests"])
    depth = None if cell["k"] == "auto" else cell["k"]
    model = PairModel(BUNDLED / "target", BUNDLED / "draft", hardware)
    return model.predict(cell["batch"], cell["context"] + generated // 2, depth, cell["tau"])


if __name__ == "__main__":
    typer.run(main)
