"""One layer's keys or values in memory: address space for all slots, which costs what is written.

Shapes: X slots, G key/value heads, L positions, K head width, R places.
"""

from __future__ import annotations

import math
import mmap
import platform
import sys

import torch
from torch import Tensor

# Where MAP_NORESERVE has the value of Linux's generic headers. Other machines (POWER, MIPS, SPARC) have their own.
_GENERIC = {"x86_64", "aarch64", "riscv64", "s390x", "loongarch64"}


def not_reserved(system: str, machine: str) -> int:
    """The flag MAP_NORESERVE: without it Linux refuses more address space than it has memory. 0 where not known."""
    named: int | None = getattr(mmap, "MAP_NORESERVE", None)  # Python 3.13
    if named is not None:
        return named
    return 0x4000 if system.startswith("linux") and machine in _GENERIC else 0


class Pool:
    """Keys or values, [X, G, L, K] of zeros. On a CPU nothing is backed before it is written."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str):
        _, self._heads, self._positions, width = shape
        self._row_bytes = width * dtype.itemsize
        self._memory: mmap.mmap | None = None
        if torch.device(device).type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
            # Zeros, not empty: attention weighs masked columns with 0, and 0 times a stray NaN is NaN.
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | not_reserved(sys.platform, platform.machine())
            self._memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
            self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def read(self, places_BGS: Tensor, copy_BGSK: Tensor) -> None:
        """Copy what stands at these places of all single keys or values."""
        K = copy_BGSK.shape[-1]
        torch.index_select(self.tensor.view(-1, K), 0, places_BGS.flatten(), out=copy_BGSK.view(-1, K))

    def write(self, places_R: Tensor, new_RK: Tensor) -> None:
        """Put these at their places."""
        self.tensor.view(-1, new_RK.shape[-1]).index_copy_(0, places_R, new_RK)

    def release(self, slot: int, first: int, end: int) -> None:
        """Give the memory of a slot's positions back, from `first` to before `end`, behind which nothing is held.

        They are zeros again, but for the ends of odd sizes.
        """
        if self._memory is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        for head in range(slot * self._heads, (slot + 1) * self._heads):
            start, past = (at * self._positions * self._row_bytes for at in (head, head + 1))
            begin = _page_from(start + first * self._row_bytes)
            over = min(
                _page_from(start + min(end, self._positions) * self._row_bytes), past // mmap.PAGESIZE * mmap.PAGESIZE
            )
            if over > begin:
                self._memory.madvise(mmap.MADV_DONTNEED, begin, over - begin)


def _page_from(byte: int) -> int:
    """Where the operating system's first page from there on begins."""
    return -(-byte // mmap.PAGESIZE) * mmap.PAGESIZE
