"""Storage for one layer's keys or values: address space for all slots, backed by memory only where it is written.

Shapes: X slots, G key/value heads, L positions, K head width.
"""

from __future__ import annotations

import math
import mmap
import platform
import sys

import torch

# Machines where MAP_NORESERVE has the value of Linux's generic headers; POWER, MIPS and SPARC have other values.
_GENERIC = {"x86_64", "aarch64", "riscv64", "s390x", "loongarch64"}


def not_reserved(system: str, machine: str) -> int:
    """Return mmap's MAP_NORESERVE or, if unknown, 0. Without the flag, Linux refuses mappings larger than memory."""
    unnamed = 0x4000 if system.startswith("linux") and machine in _GENERIC else 0
    return getattr(mmap, "MAP_NORESERVE", unnamed)  # named since Python 3.13


class Pool:
    """One layer's keys or values [X, G, L, K], initially zero. On a CPU, only written pages take memory."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str):
        _, self._heads, self._positions, width = shape
        self._row_bytes = width * dtype.itemsize
        self._memory: mmap.mmap | None = None
        if torch.device(device).type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
            # Zeros, not empty: attention weights masked columns with 0, and 0 times a stray NaN is NaN.
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | not_reserved(sys.platform, platform.machine())
            self._memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
            self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def release(self, slot: int, first: int, end: int) -> None:
        """Release the memory of positions `first` to `end` - 1 of a slot. Positions from `end` on must not be in use.

        On a CPU the positions are then zero, except in a partial page at either end; on other devices nothing changes.
        """
        if self._memory is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        end = min(end, self._positions)
        for head in range(slot * self._heads, (slot + 1) * self._heads):
            start, past = (at * self._positions * self._row_bytes for at in (head, head + 1))
            begin = _page_from(start + first * self._row_bytes)
            over = min(_page_from(start + end * self._row_bytes), past // mmap.PAGESIZE * mmap.PAGESIZE)
            if over > begin:
                self._memory.madvise(mmap.MADV_DONTNEED, begin, over - begin)


def _page_from(byte: int) -> int:
    """Return the first boundary of the operating system's pages at or after `byte`."""
    return -(-byte // mmap.PAGESIZE) * mmap.PAGESIZE
