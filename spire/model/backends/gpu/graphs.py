"""CUDA graphs: work on fixed tensors is recorded once, and launched as a whole afterwards.

A step of a model launches a thousand kernels, and each launch takes the host longer than many of the kernels run. A
graph is recorded for each key, which must name all that the work depends on besides its inputs. The work must not wait
for the GPU and must not copy from the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from spire.lost_device import device_lost

log = structlog.get_logger()

Outputs = tuple[Tensor, ...]
# Records work. Returns a function that runs the work again, and the tensors to which it writes its outputs.
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]

# The most graphs to keep. Each keeps the memory of its outputs.
_MOST = 64


class Recorded(NamedTuple):
    inputs: Outputs
    replay: Callable[[], None]
    outputs: Outputs


class Graphs:
    """The graphs of one model, by key. The least recently used ones are dropped. Called by one thread."""

    def __init__(self, record: Record):
        self._record: Record | None = record
        self._recorded: OrderedDict[Hashable, Recorded] = OrderedDict()

    def run(self, key: Hashable, rows: int, inputs: Sequence[Tensor], work: Callable[..., Outputs]) -> Outputs:
        """Return work(*inputs), by a graph. The next call overwrites what an earlier call of the same key returned.

        Inputs with fewer than `rows` rows are padded with zeros or with rows of an earlier call. After a failure to
        record, which is logged, work runs without graphs and padding. Raises errors after which this process can no
        longer use its GPU.
        """
        recorded = self._recorded.get(key) or self._new(key, rows, inputs, work)
        if recorded is None:
            return work(*inputs)
        self._recorded.move_to_end(key)
        for fixed, given in zip(recorded.inputs, inputs, strict=True):
            fixed[: len(given)].copy_(given, non_blocking=True)
        recorded.replay()
        return recorded.outputs

    def _new(self, key: Hashable, rows: int, inputs: Sequence[Tensor], work: Callable[..., Outputs]) -> Recorded | None:
        if self._record is None:
            return None
        fixed = tuple(given.new_zeros(rows, *given.shape[1:]) for given in inputs)
        for padded, given in zip(fixed, inputs, strict=True):
            padded[: len(given)] = given
        try:
            self._recorded[key] = Recorded(fixed, *self._record(partial(work, *fixed)))
        except Exception as error:  # a library may refuse to be recorded in its own way
            if device_lost(error):
                raise
            log.warning("no CUDA graphs: kernels are launched one by one", reason=repr(error)[:200])
            self._record = None
            return None
        if len(self._recorded) > _MOST:
            self._recorded.popitem(last=False)
        return self._recorded[key]


class CudaRecorder:
    """Records CUDA graphs that share memory for intermediate results, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        # Run once before recording: kernels are loaded and compiled, and libraries take their workspaces.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of a service use the GPU meanwhile, which must not spoil the recording.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()
        return graph.replay, outputs
