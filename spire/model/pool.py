"""One layer's keys or values in memory: address space for all slots, which costs what is written.

Shapes: N groups of X slots, P pages of C positions, G key/value heads, K head width, R places.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


class Pool:
    """Keys or values, [N, P, G, X, C, K] of zeros. On a CPU nothing is backed before it is written.

    `transposed` in memory, [N, P, G, X, K, C]: few float32 queries are multiplied with such keys half again as fast.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, transposed: bool = False
    ):
        self._row_bytes = math.prod(shape[4:]) * dtype.itemsize
        _, self._pages, self._heads, self._group, self._columns, _ = shape
        self._transposed = transposed
        in_memory = (*shape[:4], shape[5], shape[4]) if transposed else shape
        self._memory: mmap.mmap | None = None
        if torch.device(device).type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
            # Zeros, not empty: attention weighs masked columns with 0, and 0 times a stray NaN is NaN.
            memory = torch.zeros(in_memory, dtype=dtype, device=device)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, math.prod(shape[:4]) * self._row_bytes, flags=flags)
            memory = torch.frombuffer(self._memory, dtype=dtype).view(in_memory)
        self.tensor = memory.mT if transposed else memory

    def of(self, slot: int) -> Tensor:
        """All there is of one slot, [P, G, C, K]."""
        return self.tensor[slot // self._group, :, :, slot % self._group]

    def read(self, places_BGS: Tensor, copy_BGSK: Tensor) -> None:
        """Copy what stands at these places."""
        if self._transposed:
            copy_BGSK.copy_(self._one_by_one[self._blocks_and_columns(places_BGS)])
        else:
            K = copy_BGSK.shape[-1]
            torch.index_select(self.tensor.view(-1, K), 0, places_BGS.flatten(), out=copy_BGSK.view(-1, K))

    def write(self, places_R: Tensor, new_RK: Tensor) -> None:
        """Put these at their places."""
        if self._transposed:
            self._one_by_one[self._blocks_and_columns(places_R)] = new_RK
        else:
            self.tensor.view(-1, new_RK.shape[-1]).index_copy_(0, places_R, new_RK)

    @property
    def _one_by_one(self) -> Tensor:
        return self.tensor.flatten(0, 3)

    def _blocks_and_columns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return places // self.tensor.shape[4], places % self.tensor.shape[4]

    def release(self, slot: int, positions: int) -> None:
        """Give the memory of a slot's first positions back, of a page all or none; they are zeros again, but for the
        ends of odd sizes."""
        if self._memory is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        pages, columns = -(-positions // self._columns), min(positions, self._columns)
        bytes_ = self._row_bytes // self._columns * columns
        before = slot // self._group * self._pages * self._heads
        for row in range(before, before + pages * self._heads):
            start = (row * self._group + slot % self._group) * self._row_bytes
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (start + bytes_ - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0:
                self._memory.madvise(mmap.MADV_DONTNEED, first, length)
