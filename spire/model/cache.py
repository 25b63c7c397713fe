"""The target's cache: a block table whose blocks, on a CPU, are pages of neighbouring slots.

Page p holds positions p · C to (p + 1) · C of every slot, contiguous, so a batch whose slots are neighbours reads the
pool itself and only as many pages as its longest sequence needs: nothing is gathered, nothing copied.
`append` writes behind the committed length; `commit` alone moves that length on, and `rewind` back. So a rejected token
is simply never committed, and the next append overwrites it. A batch is ragged: short rows are padded, their padding
likewise.

Shapes: P pages of C positions, B sequences, T new positions, S attended positions, G key/value heads, K head width.
What it does not know: pages that are allocated one by one, and sharing of prefixes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from spire.errors import OutOfCapacity
from spire.model.config import ModelConfig
from spire.model.layers import attend

# Positions per page on a CPU. On a GPU one page holds everything: kernels there read a stretch without copying it.
_PAGE = 256

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
        # At least one column more than can be committed: there the padding of full rows goes.
        pages = capacity // _PAGE + 1
        self.paged = torch.device(device).type == "cpu"
        self.pages, self.page = (pages, _PAGE) if self.paged else (1, pages * _PAGE)
        shape = (self.pages, slots, config.num_key_value_heads, self.page, config.head_dim)
        # Zeros, not empty: attention weighs masked columns with 0, and 0 times a stray NaN is NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self._free = list(range(slots))

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
                tensor[:, slot].zero_()
        self.lengths[slot] = 0
        heapq.heappush(self._free, slot)

    def neighbourhood(self, slots: Sequence[int], new_tokens: int) -> Sequence[int]:
        """The range of slots around these, given in ascending order, when reading it beats gathering them.

        Appending to the slots in between is harmless: what is not committed is overwritten.
        """
        around = range(slots[0], slots[-1] + 1)
        cheap = new_tokens <= _FEW_TOKENS and len(around) <= _GATHER_COST * len(slots)
        return around if cheap else slots

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Take back what a slot holds from `lengths` on: a draft's guesses stay only until they are verified."""
        for slot, length in zip(slots, lengths, strict=True):
            if length > self.lengths[slot]:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, not the {length} to go back to")
            self.lengths[slot] = length

    def view(self, slots: Sequence[int], new_tokens: int) -> BatchView:
        """What one forward needs to append `new_tokens` positions to each of these slots."""
        return BatchView(self, slots, new_tokens)

    def gather(self, slots: Sequence[int], positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of all N layers' keys and values at chosen committed positions of these slots, [N, B, G, S, K]."""
        _, X, G, C, K = self.keys[0].shape
        device = positions_BS.device
        pages_B1S = (positions_BS // C)[:, None]
        slots_B11 = torch.tensor(slots, device=device)[:, None, None]
        heads_G1 = torch.arange(G, device=device)[:, None]
        # Row numbers of the pool seen as a list of single keys: one contiguous read for each.
        rows_BGS = ((pages_B1S * X + slots_B11) * G + heads_G1) * C + (positions_BS % C)[:, None]
        gathered = []
        for pools in (self.keys, self.values):
            copies_NBGSK = pools[0].new_empty(len(pools), *rows_BGS.shape, K)
            for pool, copy in zip(pools, copies_NBGSK, strict=True):
                torch.index_select(pool.view(-1, K), 0, rows_BGS.flatten(), out=copy.view(-1, K))
            gathered.append(copies_NBGSK)
        return gathered[0], gathered[1]

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Make the first counts[i] appended positions of each slot part of its sequence."""
        for slot, count in zip(slots, counts, strict=True):
            if self.lengths[slot] + count > self.capacity:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, {count} more do not fit")
            self.lengths[slot] += count


class BatchView:
    """The cache during one forward over some slots: implements the target's KeyValues."""

    def __init__(self, cache: TargetCache, slots: Sequence[int], new_tokens: int):
        self._cache = cache
        self._slots = slots
        self._neighbours = all(b - a == 1 for a, b in pairwise(slots))
        lengths = [cache.lengths[slot] for slot in slots]
        last_column = cache.pages * cache.page - 1
        self._needed = min(max(lengths) + new_tokens, last_column + 1)
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        self._slots_B = torch.tensor(slots, device=device)
        self.positions_BT = torch.tensor(lengths, device=device)[:, None] + torch.arange(new_tokens, device=device)
        # Padding of a row that is nearly full piles up in the last column, which is never committed.
        columns_BT = self.positions_BT.clamp(max=last_column)
        self._page_BT, self._column_BT = columns_BT // cache.page, columns_BT % cache.page
        attended = self._pages_needed * cache.page if cache.paged else self._needed
        hidden_BTS = torch.arange(attended, device=device) > columns_BT[..., None]
        mask = torch.zeros(hidden_BTS.shape, dtype=dtype, device=device)
        self.mask = mask.masked_fill_(hidden_BTS, torch.finfo(dtype).min).unsqueeze(1)

    @property
    def _pages_needed(self) -> int:
        return -(-self._needed // self._cache.page)

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        """Store the new positions of one layer; what its queries find in all positions up to their own."""
        return attend(queries_BHTK, *self.append(layer, keys_BGTK, values_BGTK), self.mask)

    def append(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of one layer; return all keys and values that may be attended.

        They come in pages, [P, B, G, C, K], or as [B, G, S, K] where one page holds everything.
        """
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for pool, new_BGTK in ((keys, keys_BGTK), (values, values_BGTK)):
            pool[self._page_BT, self._slots_B[:, None], :, self._column_BT] = new_BGTK.transpose(1, 2)
        return self._rows(keys), self._rows(values)

    def _rows(self, pool: Tensor) -> Tensor:
        pool = pool[: self._pages_needed] if self._cache.paged else pool[0, :, :, : self._needed]
        slot_dimension = pool.ndim - 4
        if self._neighbours:
            return pool.narrow(slot_dimension, self._slots[0], len(self._slots))
        return pool.index_select(slot_dimension, self._slots_B)
