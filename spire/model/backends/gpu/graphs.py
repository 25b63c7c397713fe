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
Work = Callable[..., Outputs]
# Records work. Returns a function that runs the work again, and the tensors to which it writes its outputs.
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]

# The most graphs to keep, each with the memory of its outputs, and the most keys to remember as seen once.
_MOST, _MOST_SEEN = 128, 1024


class Input(NamedTuple):
    """An input with one row for each sequence. `padding` fills the rows behind; None: any number may stand there."""

    given: Tensor
    padding: int | None = None


class Recorded(NamedTuple):
    fixed: Outputs
    replay: Callable[[], None]
    outputs: Outputs
    # Keeps what the work refers to, whose addresses are in the graph.
    work: Work


class Graphs:
    """The graphs of one model, by key. The least recently used ones are dropped. Called by one thread."""

    def __init__(self, record: Record):
        self._record: Record | None = record
        self._recorded: OrderedDict[Hashable, Recorded] = OrderedDict()
        # Keys that came once, in order, and keys for which memory was too little.
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._too_large = set[Hashable]()

    def run(self, key: Hashable, rows: int, inputs: Sequence[Input], work: Work) -> Outputs:
        """Return work(*inputs), by a graph from the second time on that the key comes.

        A graph gets inputs of `rows` rows, and its outputs have so many. They hold until any graph runs again. After a
        failure to record, which is logged, work runs without graphs and padding. Raises errors after which this process
        can no longer use its GPU.
        """
        recorded = self._recorded.get(key) or self._new(key, rows, inputs, work)
        if recorded is None:
            return work(*(each.given for each in inputs))
        self._recorded.move_to_end(key)
        for fixed, each in zip(recorded.fixed, inputs, strict=True):
            _fill(fixed, each)
        recorded.replay()
        return recorded.outputs

    def _new(self, key: Hashable, rows: int, inputs: Sequence[Input], work: Work) -> Recorded | None:
        if self._record is None or key in self._too_large:
            return None
        if key not in self._seen:  # recording takes longer than a few runs
            self._seen[key] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
            return None
        try:
            fixed = tuple(each.given.new_zeros(rows, *each.given.shape[1:]) for each in inputs)
            for padded, each in zip(fixed, inputs, strict=True):
                _fill(padded, each)
            self._recorded[key] = Recorded(fixed, *self._record(partial(work, *fixed)), work)
        except torch.OutOfMemoryError as error:
            log.warning("no memory for a CUDA graph: its kernels are launched one by one", reason=repr(error)[:200])
            self._too_large.add(key)
            return None
        except Exception as error:  # a library may refuse to be recorded in its own way
            if device_lost(error) and not refused_to_be_recorded(error):
                raise
            log.warning("no CUDA graphs: kernels are launched one by one", reason=repr(error)[:200])
            self._record = None
            return None
        if len(self._recorded) > _MOST:
            self._recorded.popitem(last=False)
        return self._recorded[key]


def _fill(fixed: Tensor, each: Input) -> None:
    count = len(each.given)
    fixed[:count].copy_(each.given, non_blocking=True)
    if each.padding is not None and count < len(fixed):
        fixed[count:] = each.padding


def refused_to_be_recorded(error: BaseException) -> bool:
    """True for an error by which CUDA refuses an operation within a recording: the GPU can be used afterwards."""
    return "captur" in str(error).lower()


class CudaRecorder:
    """Records CUDA graphs that share memory for intermediate results, because only one runs at a time."""

    def __init__(self) -> None:
        self._pool, self._aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        # Run once before recording: kernels are loaded and compiled, and libraries take their workspaces.
        before = torch.cuda.current_stream()
        try:
            self._aside.wait_stream(before)
            with torch.cuda.stream(self._aside):
                work()
            before.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads of a service use the GPU meanwhile, which must not spoil the recording.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"):
                outputs = work()
        finally:
            torch.cuda.set_stream(before)  # torch leaves the other one set if the recording fails
        return graph.replay, outputs
