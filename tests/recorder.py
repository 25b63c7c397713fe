"""A double of CUDA graphs, which needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spire.decoding import sampling, verification
from spire.model.backends.gpu.graphs import Outputs


class Recorder:
    """As a CUDA graph: what work reads and writes lies in fixed tensors. Counts, and may fail as a capture does.

    Graphs share memory: a replay overwrites what all of them returned.
    """

    def __init__(self, fails: bool = False):
        self.recorded, self.replayed, self.fails = 0, 0, fails
        self._returned: list[Outputs] = []

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        if self.fails:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        self.recorded += 1
        with nothing_from_outside(), not_waiting():
            outputs = work()

        self._returned.append(outputs)

        def replay() -> None:
            self.replayed += 1
            for stale in chain(*self._returned):
                stale.fill_(torch.nan if stale.is_floating_point() else 77)
            with not_waiting():
                again = work()
            for fixed, new in zip(outputs, again, strict=True):
                fixed.copy_(new)

        return replay, outputs


@contextmanager
def not_waiting() -> Iterator[None]:
    """Sampling and verification compute as for a GPU, which they do not wait for."""
    with ExitStack() as stack:
        for module in (sampling, verification):
            stack.enter_context(mock.patch.object(module, "may_wait", return_value=False))
        yield


class _NoWaiting(TorchDispatchMode):
    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(name in str(func) for name in self.REFUSED):
            raise RuntimeError(f"{func} within a graph")
        return func(*args, **(kwargs or {}))


class _NoHostData(TorchFunctionMode):
    REFUSED = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in self.REFUSED:
            raise RuntimeError(f"{func} within a graph")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_from_outside() -> Iterator[None]:
    """Refuse what a capture does not permit: to wait for a number, shapes of numbers, copies from the host."""
    with _NoWaiting(), _NoHostData():
        yield
