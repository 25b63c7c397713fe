"""Peers: alternatives to Spire, measured on the same checkpoint, prompts and dtype, in the same run.

Each peer is a separate process, started while no Spire service computes. Only the times and tokens of a peer's steps
are known, so the *decode* rate covers all steps after the first, which includes the prefill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from spire.bench.cell import Cell
from spire.bench.load import Batch
from spire.bench.stream import Streamed
from spire.bench.throughput import Figures, figures_of_steps
from spire.errors import SpireError
from spire.model.config import load_draft_config

TRANSFORMERS = "transformers"


class Task(NamedTuple):
    """Measurements to make with a peer. `assistant` is a draft that needs no target activations, or None."""

    model: Path
    assistant: Path | None
    loads: Sequence[Batch]
    dtype: str
    k: int
    repeats: int
    seed: int


def check(names: Sequence[str]) -> None:
    """Raise SpireError if a peer in `names` is unknown or not installed."""
    for name in names:
        if name != TRANSFORMERS:
            raise SpireError(f"--peers {name} is not known: there is {TRANSFORMERS}")
        if find_spec(name) is None:
            raise SpireError(f"--peers {name} needs it installed: pip install 'spire-serve[peers]'")


def assistant_of(drafts: Sequence[Path]) -> Path | None:
    """Return the first draft that needs no target activations, which transformers can load, or None."""
    return next((draft for draft in drafts if load_draft_config(draft).kind == "vanilla"), None)


def run_transformers(task: Task) -> Iterator[Cell]:
    """Measure transformers in a separate process and yield each cell. Raises SpireError if the process fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "spire.bench.peers.transformers_peer"]
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as complaints:
        json.dump(_message(task), told)
        told.seek(0)
        with subprocess.Popen(
            command, stdin=told, stdout=subprocess.PIPE, stderr=complaints, env=environment, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield _cell(json.loads(line))
        if process.returncode:
            complaints.seek(0)
            last = "\n".join(complaints.read().strip().splitlines()[-8:])
            raise SpireError(f"{TRANSFORMERS} ended with exit code {process.returncode}:\n{last}")


def cells(task: Task) -> int:
    """Return the number of cells that `run_transformers` will yield."""
    modes = 3 if task.assistant else 2
    return sum(modes if load.batch == 1 else 1 for load in task.loads)


def _message(task: Task) -> dict[str, Any]:
    seeds = [task.seed + 1_000_000 * at for at in range(task.repeats)]
    loads = [
        {"batch": load.batch, "context": load.context, "generate": load.generate}
        | {"prompts": [load.source.cut(load.batch, load.context, seed) for seed in seeds]}
        for load in task.loads
    ]
    assistant = str(task.assistant) if task.assistant else None
    common = {"model": str(task.model), "assistant": assistant, "dtype": task.dtype, "k": task.k}
    return common | {"loads": loads, "temperature": task.loads[0].temperature}


def _cell(answer: dict[str, Any]) -> Cell:
    runs = [_figures(run, answer["batch"], answer["peak_memory_bytes"]) for run in answer["runs"]]
    note = ", ".join(f"{name} {value}" for name, value in answer["way"].items())
    if answer["mode"] != "generate":
        note += " (transformers assists one sequence at a time: measured at batch 1 only)"
    return Cell(f"{TRANSFORMERS} {answer['mode']}", None, None, answer["batch"], answer["context"], runs, note=note)


def _figures(stamps: list[tuple[float, int]], batch: int, peak: int | None) -> Figures:
    """Compute the figures of a run in which all sequences of the batch advance together."""
    before = [0, *(tokens for _, tokens in stamps)]
    arrivals = [(moment, tokens - had) for (moment, tokens), had in zip(stamps, before, strict=False)]
    steps = len(stamps) - 1
    told = {"num_spec_steps": steps, "num_accepted_draft_tokens": stamps[-1][1] - stamps[0][1] - steps}
    return figures_of_steps([Streamed(0.0, arrivals, metrics={"speculative_decoding": told})] * batch, peak)
