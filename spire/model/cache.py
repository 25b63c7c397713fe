"""The target's cache: a block table whose block, on a CPU, is a whole slot of contiguous positions.

Slots are preallocated, so nothing is gathered when the batch's slots are neighbours: attention reads the pool itself.
`append` writes behind the committed length; only `commit` moves that length. So a rejected token is simply never
committed, and the next append overwrites it. A batch is ragged: short rows are padded, their padding likewise.

Shapes: B sequences, T new positions, S attended positions, G key/value heads, K head width.
What it does not know: pages smaller than a slot, and sharing of prefixes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from spire.errors import OutOfCapacity
from spire.model.config import ModelConfig

# Columns that can be written but never committed, so that a padded row has somewhere to put its garbage.
_SLACK = 64

# A gathered row is read, written and read again. A row that nobody asked for is read once, but also computed: that is
# cheap beside reading its cache only while there are few new tokens.
_GATHER_COST = 1.5
_FEW_TOKENS = 32


class TargetCache:
    """Keys and values of `slots` sequences of up to `capacity` committed positions each."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.capacity = capacity
        self.lengths = [0] * slots
        width = capacity + _SLACK - capacity % _SLACK
        shape = (slots, config.num_key_value_heads, width, config.head_dim)
        # Zeros, not empty: attention weighs masked columns with 0, and 0 times a stray NaN is NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self._free = list(range(slots))

    @property
    def width(self) -> int:
        return self.keys[0].shape[2]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """The lowest free slot, so that sequences stay neighbours. Raises OutOfCapacity when all are taken."""
        if not self._free:
            raise OutOfCapacity(f"all {len(self.lengths)} sequences that this verifier can hold are taken")
        slot = heapq.heappop(self._free)
        self.lengths[slot] = 0
        return slot

    def free(self, slot: int, scrub: bool = False) -> None:
        """Give a slot back. `scrub` clears it, for a sequence whose numbers were not finite."""
        if scrub:
            for tensor in (*self.keys, *self.values):
                tensor[slot].zero_()
        self.lengths[slot] = 0
        heapq.heappush(self._free, slot)

    def neighbourhood(self, slots: Sequence[int], new_tokens: int) -> Sequence[int]:
        """The range of slots around these, given in ascending order, when reading it beats gathering them.

        Appending to the slots in between is harmless: what is not committed is overwritten.
        """
        around = range(slots[0], slots[-1] + 1)
        cheap = new_tokens <= _FEW_TOKENS and len(around) <= _GATHER_COST * len(slots)
        return around if cheap else slots

    def view(self, slots: Sequence[int], new_tokens: int) -> BatchView:
        """What one forward needs to append `new_tokens` positions to each of these slots."""
        return BatchView(self, slots, new_tokens)

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Make the first counts[i] appended positions of each slot part of its sequence. Only this moves a length."""
        for slot, count in zip(slots, counts, strict=True):
            if self.lengths[slot] + count > self.capacity:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, {count} more do not fit")
            self.lengths[slot] += count


class BatchView:
    """The cache during one forward over some slots: implements the target's KeyValues."""

    def __init__(self, cache: TargetCache, slots: Sequence[int], new_tokens: int):
        self._cache = cache
        self._slots = slots
        lengths = [cache.lengths[slot] for slot in slots]
        self._start = lengths[0] if min(lengths) == max(lengths) else None
        self._neighbours = all(b - a == 1 for a, b in pairwise(slots))
        self._width = self._attended(max(lengths) + new_tokens)
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        self._slots_B = torch.tensor(slots, device=device)
        self.positions_BT = torch.tensor(lengths, device=device)[:, None] + torch.arange(new_tokens, device=device)
        # Padding of a row that is nearly full piles up in the last column, which is never committed.
        self._columns_BT = self.positions_BT.clamp(max=cache.width - 1)
        hidden_BTS = torch.arange(self._width, device=device) > self._columns_BT[..., None]
        mask = torch.zeros(hidden_BTS.shape, dtype=dtype, device=device)
        self.mask: Tensor | None = mask.masked_fill_(hidden_BTS, torch.finfo(dtype).min).unsqueeze(1)

    def _attended(self, needed: int) -> int:
        """Beyond half the slot, reading all of it beats copying the slice that a matmul makes of it."""
        whole = self._cache.width
        return whole if needed > whole // 2 else needed

    def append(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of one layer; return all keys and values that may be attended, [B, G, S, K]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._store(keys, keys_BGTK)
        self._store(values, values_BGTK)
        return self._rows(keys), self._rows(values)

    def _store(self, pool: Tensor, new_BGTK: Tensor) -> None:
        end = (self._start or 0) + new_BGTK.shape[2]
        if self._start is not None and self._neighbours and end <= pool.shape[2]:
            self._block(pool)[:, :, self._start : end] = new_BGTK
        else:
            pool[self._slots_B[:, None], :, self._columns_BT] = new_BGTK.transpose(1, 2)

    def _rows(self, pool: Tensor) -> Tensor:
        if self._neighbours:
            return self._block(pool)[:, :, : self._width]
        return pool[:, :, : self._width].index_select(0, self._slots_B)

    def _block(self, pool: Tensor) -> Tensor:
        return pool[self._slots[0] : self._slots[0] + len(self._slots)]
