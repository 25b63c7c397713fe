"""The measurements of `spire bench`, in order: each draft in its own services, then peers, then another server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress, TaskID

from spire.bench.cell import AUTO, SPIRE, Cell, Depth
from spire.bench.chats import ChatSource, ChosenChats
from spire.bench.client import Request
from spire.bench.load import Batch, Load, alternate
from spire.bench.peers.against import Server
from spire.bench.peers.servers import TRANSFORMERS, Task, assistant_of, cells as peer_cells, run_transformers
from spire.bench.prediction import PairModel
from spire.bench.system import System
from spire.cli.paths import Pair
from spire.perf.hardware import Hardware

_WARM_TOKENS, _WARM_REQUESTS = 16, 4
# Unmeasured runs of each load at automatic k, because the choice of k learns while serving: at most so many runs, and
# of wide batches as few as have so many requests.
_LEARNING, _LEARNT_FROM = 8, 64
# Depth of a peer if no fixed depth above 0 is requested.
_LOOKED_UP = 4


def learning_runs(load: Load) -> int:
    """Return how often a load runs unmeasured at automatic k before it is measured; 0 for a trace, which may learn."""
    return max(1, min(_LEARNING, _LEARNT_FROM // load.batch)) if load.batch else 0


class Chosen(NamedTuple):
    """A draft to measure: its name in outputs and the pair to serve. `known`: False for a gateway's unknown draft."""

    name: str
    pair: Pair
    known: bool = True


@dataclass(frozen=True)
class Run:
    """The loads, depths and repeats to measure on each system, and the hardware for predictions."""

    loads: list[Load]
    depths: list[Depth]
    repeats: int
    seed: int
    hardware: Hardware | None
    # Acceptance probability of every draft token; set only for synthetic acceptance.
    accept_rate: float | None = None
    # Of a load that consists of chats: the same with the chats that were chosen.
    _chosen: dict[Load, Load] = field(default_factory=dict)

    def of(self, system: System, chosen: Chosen, progress: Progress, task: TaskID) -> Iterator[Cell]:
        """Measure a draft on `system`: yield the cell of each load at each depth, after an unmeasured warm-up.

        If automatic k is to be measured on batches, each load first runs unmeasured, so that the choice of k learns.
        """
        depths: list[Depth] = self.depths if chosen.pair.speculates or not chosen.known else [0]
        learning = [learning_runs(load) if AUTO in depths else 0 for load in self.loads]
        total = len(depths) + self.repeats * len(depths) * len(self.loads) + sum(learning)
        progress.update(task, description=f"{chosen.name}: warming", total=total)
        # The warm-up is a short batch, as wide as the widest load.
        first, width = self.loads[0], max(load.batch or _WARM_REQUESTS for load in self.loads)
        shortest = min(load.context or _WARM_TOKENS for load in self.loads)
        warming = Batch(first.source, width, shortest, _WARM_TOKENS, first.temperature)
        alternate(system, warming, depths, 1, self.seed - 1, lambda: progress.advance(task))
        for at, load in enumerate(self.loads):
            progress.update(task, description=f"{chosen.name}: {load.name}")
            load = self._with_chosen_chats(load, system)
            seed = self.seed + 1000 * at
            alternate(system, load, [AUTO], learning[at], seed + 500, lambda: progress.advance(task), split_turns=0)
            runs = alternate(system, load, depths, self.repeats, seed, lambda: progress.advance(task))
            for depth in depths:
                cell = Cell(SPIRE, chosen.name, depth, load.batch, load.context, runs[depth], runs[0], trace=load.trace)
                left_out = load.source.left_out if isinstance(load.source, ChosenChats) else None
                modelled = self._modelled(chosen, load, cell)
                yield replace(cell, modelled=modelled, note=left_out, synthetic=self.accept_rate is not None)

    def _with_chosen_chats(self, load: Load, system: System) -> Load:
        """Return the load with chats chosen by the first system's answers; any other load as it is."""
        if not isinstance(load.source, ChatSource) or not isinstance(load, Batch):
            return load
        if load not in self._chosen:
            request = Request(load.generate, load.temperature)
            self._chosen[load] = replace(load, source=ChosenChats(load.source, system.url, request))
        return self._chosen[load]

    def peers(
        self, target: Path, drafts: list[Path], dtype: str, cells: list[Cell], progress: Progress
    ) -> Iterator[Cell]:
        """Measure peers: yield their cells, compared to Spire's plain decoding at the same batch and context."""
        loads = (self._chosen.get(load, load) for load in self.loads)
        batches = [load for load in loads if isinstance(load, Batch)]
        depth = next((depth for depth in self.depths if depth not in (0, AUTO)), _LOOKED_UP)
        assert depth != AUTO
        task = Task(target, assistant_of(drafts), batches, dtype, depth, self.repeats, self.seed)
        row = progress.add_task(TRANSFORMERS, total=peer_cells(task))
        for cell in run_transformers(task):
            yield self._beside_plain(cell, cells)
            progress.advance(row)

    def against(self, server: Server, cells: list[Cell], progress: Progress) -> Iterator[Cell]:
        """Measure another server: yield the cell of each load, compared to Spire's plain decoding of the same load."""
        row = progress.add_task(server.url, total=len(self.loads) * (self.repeats + 1))
        for at, load in enumerate(self.loads):
            same, seed = self._chosen.get(load, load), self.seed + 1000 * at
            cell = server.measure(same, self.repeats, seed, lambda: progress.advance(row))
            yield self._beside_plain(cell, cells)

    def _modelled(self, chosen: Chosen, load: Load, cell: Cell) -> dict[str, Any]:
        if self.hardware is None or not chosen.known or cell.k == 0 or not isinstance(load, Batch):
            return {}
        model = PairModel(chosen.pair.model, chosen.pair.draft, self.hardware, self.accept_rate, load.temperature)
        depth = None if cell.k == AUTO else cell.k
        return model.predict(load.batch, load.context + load.generate // 2, depth, cell.figures.tau)

    def _beside_plain(self, cell: Cell, cells: list[Cell]) -> Cell:
        same = [c.runs for c in cells if c.k == 0 and (c.batch, c.context) == (cell.batch, cell.context)]
        return replace(cell, plain=same[-1] if same else None, synthetic=self.accept_rate is not None)
