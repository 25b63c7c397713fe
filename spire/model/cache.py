"""The target's KV cache: keys and values of all slots, and the number of committed positions of each slot.

A slot has address space for the longest sequence. On a CPU, a page takes memory when it is first written, and releases
it after its sequence has ended, once another slot needs memory. Sequences thus take only the memory that they fill,
within a `budget` (as vAttention does on a GPU). The positions of a slot are contiguous.
`attend` writes after the committed length; only `commit` and `rewind` change that length. A rejected token is therefore
never committed, and the next append overwrites it. A batch is ragged: short rows are padded, and their padding is
overwritten in the same way.

Shapes: N layers, B sequences, T new positions, S attended positions, L positions of a slot, G key/value heads, K head
width, R rows of a forward over several views.
Does not know: pages on a GPU, where all of a slot is allocated at the start.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spire.errors import OutOfCapacity
from spire.kernels import kernels_for
from spire.model import paging
from spire.model.backends.fused_attention import FusedAttention, FusedPools
from spire.model.backends.gpu_kernels import gpu_kernels
from spire.model.config import ModelConfig
from spire.model.layers import additive, attend
from spire.model.pool import Pool

_STEP = 64


class TargetCache:
    """The target's KV cache: `slots` sequences of up to `capacity` committed positions, in at most `budget` bytes.

    `parking` more slots follow, which `allocate` never returns: ended sequences are copied to them for reuse.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        parking: int = 0,
        budget: int | None = None,
    ):
        self.slots, self.capacity, self.device = slots, capacity, torch.device(device)
        self.lengths = [0] * (slots + parking)
        pages = paging.positions_of(capacity) // paging.PAGE
        self.on_cpu = self._is_cpu(self.device)
        self.pages, self.page = (pages, paging.PAGE) if self.on_cpu else (1, pages * paging.PAGE)
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        heads, width = config.num_key_value_heads, config.head_dim
        self._width = width
        shape = (len(self.lengths), heads, pages * paging.PAGE, width)
        layers = range(config.num_hidden_layers)
        self.page_bytes = 2 * len(layers) * heads * self.page * width * dtype.itemsize
        self._budget = self.pages * slots if budget is None else budget // self.page_bytes
        least = self.pages if self.on_cpu else len(self.lengths)  # pages: of one sequence, or all slots at the start
        if budget is not None and self._budget < least:
            what = "one sequence" if self.on_cpu else f"{slots} slots"
            raise OutOfCapacity(
                f"{budget / 1e6:.1f} MB are too little for {what} of {capacity} positions: "
                f"{least * self.page_bytes / 1e6:.1f} MB are needed"
            )
        self.keys = [Pool(shape, dtype, device) for _ in layers]
        self.values = [Pool(shape, dtype, device) for _ in layers]
        self._pools = [*self.keys, *self.values]
        self.fused = self._fused_pools(config, dtype) if self.on_cpu else None
        # GPU kernels for few queries, or None.
        self.paged = None if self.on_cpu else gpu_kernels(self.keys[0].tensor, self.queries_per_key)
        # Pages of each slot: those reserved for its sequence, and those held, which may be backed by memory. Pages held
        # beyond the reserved ones stay until another slot needs memory.
        self._promised = [0] * len(self.lengths)
        self._held = [0] * len(self.lengths)
        self._free = list(range(slots))

    @staticmethod
    def _is_cpu(device: torch.device) -> bool:
        return device.type == "cpu"

    def _fused_pools(self, config: ModelConfig, dtype: torch.dtype) -> FusedPools | None:
        """Return the pools for this project's CPU kernels, or None if torch's flash kernel has to attend."""
        kernels = kernels_for(dtype)
        if not kernels or not kernels.attends(config.head_dim):
            return None
        return FusedPools(kernels, *([pool.tensor for pool in pools] for pools in (self.keys, self.values)))

    @property
    def bytes(self) -> int:
        """The KV cache's budget in bytes."""
        return self._budget * self.page_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes that may be backed by memory. Exceeds reserved bytes if slots keep memory of ended sequences."""
        return sum(self._held) * self.page_bytes

    @property
    def live_bytes(self) -> int:
        """The bytes reserved for live sequences. Any thread may read this property."""
        return sum(self._promised[: self.slots]) * self.page_bytes

    @property
    def parked_bytes(self) -> int:
        """The bytes reserved for copies of ended sequences in parking slots. Any thread may read this property."""
        return sum(self._promised[self.slots :]) * self.page_bytes

    def may_park(self, place: int, length: int) -> bool:
        """True if parking slot `place` may hold `length` positions: at most half of the memory is for parking slots."""
        others = sum(self._promised[self.slots :]) - self._promised[place]
        return others + self._pages_for(length) <= self._budget // 2

    @property
    def usage(self) -> float:
        """The share of the budget, in [0, 1], reserved for live sequences. Any thread may read this property."""
        return self.live_bytes / self.bytes

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Allocate the lowest free slot, so that used slots stay adjacent. Raises OutOfCapacity if none is free."""
        if not self._free:
            raise OutOfCapacity(f"all {self.slots} sequences that this verifier can hold are taken")
        slot = heapq.heappop(self._free)
        self.lengths[slot] = 0
        return slot

    def free(self, slot: int, scrub: bool = False) -> None:
        """Free a slot. `scrub` also zeroes its keys and values, for a sequence that computed non-finite values.

        The slot keeps its memory, reserved for no sequence, for its next sequence or until another slot needs it.
        """
        if scrub:
            for pool in self._pools:
                pool.tensor[slot, :, : self._held[slot] * self.page].zero_()
        self.lengths[slot] = self._promised[slot] = 0
        heapq.heappush(self._free, slot)

    def empty(self, slot: int) -> None:
        """Discard the content of a slot and release its memory."""
        self.lengths[slot] = self._promised[slot] = 0
        self._give_back(slot, self._held[slot])

    def reserve(self, slots: Sequence[int], new_tokens: int) -> bool:
        """Reserve memory for `new_tokens` more positions in each slot, or reserve nothing and return False."""
        needed = {slot: self._pages_for(self.lengths[slot] + new_tokens) for slot in slots}
        grown = {slot: pages for slot, pages in needed.items() if pages > self._promised[slot]}
        if not grown:
            return True
        if sum(self._promised) + sum(pages - self._promised[slot] for slot, pages in grown.items()) > self._budget:
            return False
        for slot, pages in grown.items():
            self._promised[slot] = pages
        self._make_room(sum(max(0, pages - self._held[slot]) for slot, pages in grown.items()))
        for slot, pages in grown.items():
            self._held[slot] = max(self._held[slot], pages)
        return True

    def _pages_for(self, length: int) -> int:
        return min(self.pages, -(-length // self.page))

    def _make_room(self, pages: int) -> None:
        """Release as many unreserved pages as needed so that `pages` more fit in the budget."""
        excess = sum(self._held) + pages - self._budget
        for slot in reversed(range(len(self._held))):
            if excess <= 0:
                return
            spare = min(excess, max(0, self._held[slot] - self._promised[slot]))
            self._give_back(slot, spare)
            excess -= spare

    def _give_back(self, slot: int, pages: int) -> None:
        """Release the memory of the last `pages` held pages of a slot."""
        left = self._held[slot] - pages
        if pages:
            for pool in self._pools:
                pool.release(slot, left * self.page, self._held[slot] * self.page)
        self._held[slot] = left

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to `target`. Raises OutOfCapacity if memory is short."""
        self.lengths[target] = 0
        if not self.reserve([target], length):
            raise OutOfCapacity(f"no memory for a copy of {length} positions")
        for pool in self._pools:
            pool.tensor[target, :, :length] = pool.tensor[source, :, :length]
        self.lengths[target] = length

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Reduce committed lengths, as after rejected draft tokens. Raises OutOfCapacity for a larger length."""
        for slot, length in zip(slots, lengths, strict=True):
            if length > self.lengths[slot]:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, not the {length} to go back to")
            self.lengths[slot] = length

    def view(self, slots: Sequence[int], new_tokens: int, decoding: bool = False, causal: bool = True) -> BatchView:
        """Return a view of the cache for one forward that appends `new_tokens` positions to each slot.

        `decoding`: the positions are not part of a prompt. Kernels for few queries are used only if it is True: the
        keys of a prompt must not depend on where its chunks end, so one kernel attends for chunks of any length. If
        `causal` is False, the caller must set the attention mask by `see`. Raises OutOfCapacity if memory is short.
        """
        if not self.reserve(slots, new_tokens):
            raise OutOfCapacity(f"no memory for {new_tokens} more positions of {len(slots)} sequences")
        fused = self.fused if causal else None
        if fused and fused.kernels.most_queries is not None:
            few = decoding and new_tokens * self.queries_per_key <= fused.kernels.most_queries
            fused = fused if few else None
        paged = self.paged if causal and decoding else None
        if paged and not paged.attends(self.queries_per_key, new_tokens, self._width):
            paged = None
        return BatchView(self, slots, new_tokens, fused, paged)

    def gather(self, slots: Sequence[int], positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of all N layers' keys and values at S committed positions per slot, each [N, B, G, S, K]."""
        slots_B1 = torch.tensor(slots, device=positions_BS.device)[:, None]
        places_BGS, K = self.places(slots_B1, positions_BS).transpose(1, 2).contiguous(), self._width
        keys_NBGSK, values_NBGSK = self.keys[0].tensor.new_empty(2, len(self.keys), *places_BGS.shape, K)
        for pool, copy in zip(self._pools, (*keys_NBGSK, *values_NBGSK), strict=True):
            torch.index_select(pool.tensor.view(-1, K), 0, places_BGS.flatten(), out=copy.view(-1, K))
        return keys_NBGSK, values_NBGSK

    def places(self, slots_B1: Tensor, positions_BT: Tensor) -> Tensor:
        """Return the row of each position and head, [B, T, G], in a pool viewed as rows of K numbers."""
        _, G, L, _ = self.keys[0].tensor.shape
        heads_G = torch.arange(G, device=positions_BT.device)
        return (slots_B1[..., None] * G + heads_G) * L + positions_BT[..., None]

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Commit the first counts[i] appended positions of slots[i]. Raises OutOfCapacity beyond `capacity`."""
        for slot, count in zip(slots, counts, strict=True):
            if self.lengths[slot] + count > self.capacity:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, {count} more do not fit")
            self.lengths[slot] += count


class BatchView:
    """A view of the KV cache for one forward over B slots with T new positions each. Implements KeyValues."""

    def __init__(
        self,
        cache: TargetCache,
        slots: Sequence[int],
        new_tokens: int,
        pools: FusedPools | None,
        paged: ModuleType | None = None,
    ):
        self._cache, self._paged = cache, paged
        lengths, device = [cache.lengths[slot] for slot in slots], cache.device
        self._lengths, self.shape = lengths, (len(lengths), new_tokens)
        self.fused = [FusedAttention(pools, slots, lengths, new_tokens)] if pools else []
        if pools:
            return  # these kernels compute mask and places themselves
        # All padding of a nearly full row is written to the last column, which is never committed.
        last_column = cache.pages * cache.page - 1
        columns_BT = self.positions_BT.clamp(max=last_column)
        slots_B1 = torch.tensor(slots, device=device)[:, None]
        self._places_R = cache.places(slots_B1, columns_BT).flatten()
        # Read multiples of _STEP positions, so that the order of summation does not depend on where a chunk ends.
        read = (-(-(length + new_tokens) // _STEP) * _STEP for length in lengths)
        self._needed = [min(positions, last_column + 1) for positions in read]
        self._slots, self._slots_B = slots, slots_B1[:, 0]
        if paged:
            self._pages = paged.slot_pages(self._slots_B, cache.keys[0].tensor, -(-max(self._needed) // paged.PAGE))
            self._lengths_B = self.positions_BT[:, 0].int()
            return
        self.columns_1S = torch.arange(max(self._needed), device=device)[None]
        self.see(self.columns_1S[:, None] <= columns_BT[..., None])

    @cached_property
    def positions_BT(self) -> Tensor:
        device = self._cache.device
        return torch.tensor(self._lengths, device=device)[:, None] + torch.arange(self.shape[1], device=device)

    def see(self, visible_BTS: Tensor) -> None:
        """Set the mask: the positions of its slot that each new position attends to. Not for fused attention."""
        assert not self.fused
        self._mask_B1TS = additive(visible_BTS, self._cache.keys[0].tensor.dtype)
        if self._cache.on_cpu:
            each = zip(self._mask_B1TS.split(1), self._needed, strict=True)
            self._masks = [mask[..., :end].repeat(1, 1, self._cache.queries_per_key, 1) for mask, end in each]

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        """Store one layer's new keys and values; return its attention [B, H, T, K], causal or masked by `see`."""
        if self.fused:
            return self.fused[0].attend(layer, queries_BHTK, keys_BGTK, values_BGTK)
        keys, values = self._cache.keys[layer].tensor, self._cache.values[layer].tensor
        self.store(layer, keys_BGTK, values_BGTK)
        if self._paged:
            longest = max(self._lengths)
            found: Tensor = self._paged.attend(queries_BHTK, keys, values, self._pages, self._lengths_B, longest)
            return found
        if self._cache.on_cpu:
            return torch.cat([self._of_slot(row, queries, keys, values) for row, queries in enumerate(queries_BHTK)])
        columns = self.columns_1S.shape[1]
        keys, values = (pool.index_select(0, self._slots_B)[:, :, :columns] for pool in (keys, values))
        return attend(queries_BHTK, keys, values, self._mask_B1TS)

    def _of_slot(self, row: int, queries_HTK: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return one sequence's attention output, [1, H, T, K], reading its slot in place. Queries of a key/value head
        are rows of one product, so that each key and value byte is read once."""
        mask_11RS, slot = self._masks[row], self._slots[row]
        keys_1GSK, values_1GSK = (pool[slot : slot + 1, :, : mask_11RS.shape[-1]] for pool in (keys, values))
        queries_1GRK = queries_HTK.unflatten(0, (keys.shape[1], -1)).flatten(1, 2)[None]
        found_1GRK = scaled_dot_product_attention(queries_1GRK, keys_1GSK, values_1GSK, mask_11RS)
        return found_1GRK.reshape(1, *queries_HTK.shape)

    def store(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        """Write one layer's new keys and values after the committed positions, unless a fused kernel writes them."""
        if self.fused:
            return
        for pool, new_BGTK in ((self._cache.keys[layer], keys_BGTK), (self._cache.values[layer], values_BGTK)):
            new_RK = new_BGTK.transpose(1, 2).reshape(-1, new_BGTK.shape[-1])
            pool.tensor.view(-1, new_RK.shape[-1]).index_copy_(0, self._places_R, new_RK)


class Stretches:
    """Several batch views in one forward, concatenated to one row of R positions. Implements KeyValues.

    Weights are read once for all views; each view attends separately.
    """

    def __init__(self, views: Sequence[BatchView]):
        self._views = views
        ends = accumulate((prod(view.shape) for view in views), initial=0)
        self._rows = [slice(*bounds) for bounds in pairwise(ends)]
        parts = [view.fused for view in views]
        self.fused = [part for fused in parts for part in fused] if all(parts) else []

    @cached_property
    def positions_BT(self) -> Tensor:
        """The positions of all views, concatenated to [1, R]."""
        return torch.cat([view.positions_BT.flatten() for view in self._views])[None]

    def attend(self, layer: int, queries_1HRK: Tensor, keys_1GRK: Tensor, values_1GRK: Tensor) -> Tensor:
        attended = []
        given = (queries_1HRK, keys_1GRK, values_1GRK)
        for view, rows in zip(self._views, self._rows, strict=True):
            stretch = [x[0, :, rows].unflatten(1, view.shape).transpose(0, 1) for x in given]
            attended.append(view.attend(layer, *stretch).transpose(0, 1).flatten(1, 2))
        return torch.cat(attended, dim=1)[None]

    def split(self, of_1R: Tensor) -> list[Tensor]:
        """Split the output [1, R, ...] of a forward into one tensor [B, T, ...] for each view."""
        return [of_1R[0, rows].unflatten(0, view.shape) for view, rows in zip(self._views, self._rows, strict=True)]
