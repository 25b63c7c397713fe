"""A double of CUDA graphs, which needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spire.model.backends.gpu.graphs import Outputs


class Recorder:
    """As a CUDA graph: what work reads and writes lies in fixed tensors. Counts, and may fail as a capture does."""

    def __init__(self, fails: bool = False):
        self.recorded, self.replayed, self.fails = 0, 0, fails

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1
        with NothingFromOutside():
            outputs = work()

        def replay() -> None:
            self.replayed += 1
            for stale in outputs:
                stale.fill_(torch.nan if stale.is_floating_point() else 77)
            for fixed, new in zip(outputs, work(), strict=True):
                fixed.copy_(new)

        return replay, outputs


class NothingFromOutside(TorchDispatchMode):
    """Refuses what a capture does not permit: waiting for a number, and operations of sizes that depend on numbers."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "lift_fresh")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(name in str(func) for name in self.REFUSED):
            raise RuntimeError(f"{func} within a graph")
        return func(*args, **(kwargs or {}))
