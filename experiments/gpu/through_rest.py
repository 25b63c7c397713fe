"""Part 6: tokens a second through REST of an 8B shape with random weights, whose acceptance is made up.

Each cell's requests are sent at once; what counts is the time in which all decode.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.gpu.expectation import draft_seconds, step_seconds
from experiments.gpu.findings import Finding, Findings
from experiments.gpu.machine_rates import copy_rate
from experiments.gpu.part import Setting
from experiments.gpu.shapes import shape_of
from experiments.gpu.system import served
from spire.bench.load import Batch
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.bench.stream import stream_all
from spire.bench.synthetic import write_pair
from spire.bench.system import System
from spire.bench.throughput import Figures, figures_of_steps
from spire.cli.paths import Pair
from spire.perf.shapes import Shape, trained_draft
from spire.service.keys import authorization

_ACCEPTANCE = 0.8
# Prompts must be through before the first sequence ends: many of their positions in each step.
_TOKEN_BUDGET = "4096"


@dataclass(frozen=True)
class Cell:
    """`batch` requests of `context` tokens, each answered by `generate`, at depth `k`; None: the gateway chooses."""

    batch: int
    context: int
    generate: int
    k: int | None

    @property
    def name(self) -> str:
        return f"{self.batch} × {self.context:,}, k = {self.k}, SYNTHETIC acceptance {_ACCEPTANCE}"

    @property
    def positions(self) -> int:
        return self.context + self.generate

    def expected_tokens_per_second(self, shape: Shape, rate: float) -> float:
        """τ tokens of each sequence a round, which takes the draft's passes and a step."""
        context, k = self.context + self.generate // 2, self.k or 0
        seconds = step_seconds(shape, self.batch, context, rate)
        seconds += draft_seconds(trained_draft("spire", shape).shape, k, rate)
        return self.batch * sum(_ACCEPTANCE**at for at in range(k + 1)) / seconds


_CELLS = (
    *(Cell(32, 1024, 256, k) for k in (0, 4, 6)),
    *(Cell(32, 8000, 512, k) for k in (4, 0)),
)
_TINY_CELLS = tuple(Cell(2, 24, 24, k) for k in (0, 4, 6))


def measure(setting: Setting, findings: Findings) -> None:
    cells = _TINY_CELLS if setting.tiny else _CELLS
    rate, shape = copy_rate(setting), shape_of(setting)
    with synthetic(setting, findings, cells) as run:
        for cell in cells:
            with findings.attempt(cell.name):
                findings.add(_found(cell.name, run(cell), cell.expected_tokens_per_second(shape, rate)))


@contextmanager
def synthetic(setting: Setting, findings: Findings, cells: Sequence[Cell]) -> Iterator[Callable[[Cell], Figures]]:
    """Serve the 8B shape with random weights and made-up acceptance, and yield a function that runs a cell."""
    os.environ["SPIRE_VERIFIER_TOKEN_BUDGET"] = _TOKEN_BUDGET
    # No more, so that prompts of 8,000 tokens have memory for their scores.
    os.environ["SPIRE_VERIFIER_MAX_SEQUENCES"] = str(max(cell.batch for cell in cells))
    with tempfile.TemporaryDirectory(prefix="SYNTHETIC-") as name:
        pair = Pair(*write_pair(Path(name), shape_of(setting), max(cell.positions for cell in cells) + 1))
        source = PromptSource(pair.model, [BUNDLED_TEXT])
        with served(setting, findings, pair, "bfloat16", _ACCEPTANCE) as system:
            _run(system, source, Cell(2, 24, 16, 4))  # what is slow once is over then
            yield partial(_run, system, source)


def _found(what: str, figures: Figures, expected: float) -> Finding:
    note = f"τ {figures.tau:.2f}, " if figures.tau else ""
    note += f"end to end {figures.end_to_end_tokens_per_second:,.0f}"
    return Finding(what, figures.decode_tokens_per_second, "tokens/s", expected, note, vars(figures))


def _run(system: System, source: PromptSource, cell: Cell) -> Figures:
    load = Batch(source, cell.batch, cell.context, cell.generate, temperature=1.0)
    return figures_of_steps(asyncio.run(stream_all(system.url, load.requests(cell.k, 0), authorization())), None)
