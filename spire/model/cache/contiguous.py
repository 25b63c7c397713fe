"""The KV cache on a CPU: the positions of a slot are contiguous, and memory is taken as it is written.

A slot has address space for the longest sequence. A page takes memory when it is first written, and releases it after
its sequence has ended, once another slot needs memory. Sequences thus take only the memory that they fill, within the
budget (as vAttention does on a GPU).

Shapes: B sequences, T new positions, S attended positions, L positions of a slot, R rows, G key/value heads, H query
heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spire.errors import OutOfCapacity
from spire.kernels import kernels_for
from spire.model.attention.fused_attention import FusedAttention, FusedPools
from spire.model.cache import paging
from spire.model.cache.pool import Pool
from spire.model.cache.target_cache import TargetCache
from spire.model.layers import additive

# A multiple of this many positions is read, so that the order of summation does not depend on where a chunk ends.
_STEP = 64


class ContiguousCache(TargetCache):
    """A KV cache [slots, G, L, K] per layer for keys and values each."""

    @staticmethod
    def _page_size() -> int:
        return paging.PAGE

    def _allocate(self, dtype: torch.dtype) -> None:
        shape = (len(self.lengths), self.heads, self.pages * self.page, self.width)
        self.keys = [Pool(shape, dtype, self.device) for _ in range(self.layers)]
        self.values = [Pool(shape, dtype, self.device) for _ in range(self.layers)]
        self._pools = [*self.keys, *self.values]
        pairs = zip(self.keys, self.values, strict=True)
        self.pools = [(keys.tensor.view(-1, self.width), values.tensor.view(-1, self.width)) for keys, values in pairs]
        self.fused = self._fused_pools(dtype)
        # Pages of each slot: those reserved for its sequence, and those held, which may be backed by memory. Pages held
        # beyond the reserved ones stay until another slot needs memory.
        self._promised = [0] * len(self.lengths)
        self._held = [0] * len(self.lengths)

    def _fused_pools(self, dtype: torch.dtype) -> FusedPools | None:
        """Return the pools for this project's CPU kernels, or None if torch's flash kernel has to attend."""
        kernels = kernels_for(dtype)
        if not kernels or not kernels.attends(self.width):
            return None
        return FusedPools(kernels, *([pool.tensor for pool in pools] for pools in (self.keys, self.values)))

    @property
    def held_bytes(self) -> int:
        """The bytes that may be backed by memory. Exceeds reserved bytes if slots keep memory of ended sequences."""
        return sum(self._held) * self.page_bytes

    @property
    def live_bytes(self) -> int:
        return sum(self._promised[: self.slots]) * self.page_bytes

    @property
    def parked_bytes(self) -> int:
        return sum(self._promised[self.slots :]) * self.page_bytes

    def may_park(self, place: int, length: int) -> bool:
        others = sum(self._promised[self.slots :]) - self._promised[place]
        return others + self._pages_for(length) <= self._budget // 2

    def reserve(self, slots: Sequence[int], new_tokens: int) -> bool:
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

    def _release(self, slot: int, scrub: bool) -> None:
        """Keep the slot's memory, reserved for no sequence, for its next sequence or until another slot needs it."""
        if scrub:
            for pool in self._pools:
                pool.tensor[slot, :, : self._held[slot] * self.page].zero_()
        self._promised[slot] = 0

    def empty(self, slot: int) -> None:
        self.lengths[slot] = self._promised[slot] = 0
        self._give_back(slot, self._held[slot])

    def copy(self, source: int, target: int, length: int) -> None:
        self.lengths[target] = 0
        if not self.reserve([target], length):
            raise OutOfCapacity(f"no memory for a copy of {length} positions")
        for pool in self._pools:
            pool.tensor[target, :, :length] = pool.tensor[source, :, :length]
        self.lengths[target] = length

    def _view(self, slots: Sequence[int], new_tokens: int, decoding: bool, causal: bool) -> ContiguousView:
        fused = self.fused if causal else None
        if fused and fused.kernels.most_queries is not None:
            few = decoding and new_tokens * self.queries_per_key <= fused.kernels.most_queries
            fused = fused if few else None
        return ContiguousView(self, slots, new_tokens, fused)

    def _load(self, keys_NBGSK: Tensor, values_NBGSK: Tensor) -> None:
        B, S = keys_NBGSK.shape[1], keys_NBGSK.shape[3]
        for pool, new_BGSK in zip(self._pools, (*keys_NBGSK, *values_NBGSK), strict=True):
            pool.tensor[:B, :, :S] = new_BGSK
            if not self.fused:  # torch reads beyond the last position, and a masked NaN would still spread
                pool.tensor[:B, :, S:].zero_()

    def rows(self, slots: Sequence[int], positions_BS: Tensor) -> Tensor:
        slots_B11 = torch.tensor(slots, device=positions_BS.device)[:, None, None]
        heads_G = torch.arange(self.heads, device=positions_BS.device)
        return (slots_B11 * self.heads + heads_G) * (self.pages * self.page) + positions_BS[..., None]


class ContiguousView:
    """A view of contiguous slots. Implements BatchView."""

    def __init__(self, cache: ContiguousCache, slots: Sequence[int], new_tokens: int, pools: FusedPools | None):
        self._cache, self._slots = cache, slots
        self._lengths = [cache.lengths[slot] for slot in slots]
        self.shape = len(slots), new_tokens
        self.fused = [FusedAttention(pools, slots, self._lengths, new_tokens)] if pools else []
        if pools:
            return  # these kernels compute mask and places themselves
        # All padding of a nearly full row is written to the last column, which is never committed.
        last_column = cache.pages * cache.page - 1
        columns_BT = self.positions_BT.clamp(max=last_column)
        self._rows_R = cache.rows(slots, columns_BT).flatten()
        read = (-(-(length + new_tokens) // _STEP) * _STEP for length in self._lengths)
        self._needed = [min(positions, last_column + 1) for positions in read]
        self.columns_1S = torch.arange(max(self._needed), device=cache.device)[None]
        self.see(self.columns_1S[:, None] <= columns_BT[..., None])

    @cached_property
    def positions_BT(self) -> Tensor:
        device = self._cache.device
        return torch.tensor(self._lengths, device=device)[:, None] + torch.arange(self.shape[1], device=device)

    def see(self, visible_BTS: Tensor) -> None:
        assert not self.fused
        mask_B1TS = additive(visible_BTS, self._cache.keys[0].tensor.dtype)
        each = zip(mask_B1TS.split(1), self._needed, strict=True)
        self._masks = [mask[..., :end].repeat(1, 1, self._cache.queries_per_key, 1) for mask, end in each]

    def store(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        if self.fused:
            return
        for pool_RK, new_BGTK in zip(self._cache.pools[layer], (keys_BGTK, values_BGTK), strict=True):
            pool_RK.index_copy_(0, self._rows_R, new_BGTK.transpose(1, 2).reshape(-1, pool_RK.shape[-1]))

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        if self.fused:
            return self.fused[0].attend(layer, queries_BHTK, keys_BGTK, values_BGTK)
        self.store(layer, keys_BGTK, values_BGTK)
        return torch.cat([self._of_slot(layer, row, queries) for row, queries in enumerate(queries_BHTK)])

    def _of_slot(self, layer: int, row: int, queries_HTK: Tensor) -> Tensor:
        """Return one sequence's attention output, [1, H, T, K], reading its slot in place. Queries of a key/value head
        are rows of one product, so that each key and value byte is read once."""
        mask_11RS, slot = self._masks[row], self._slots[row]
        pools = self._cache.keys[layer].tensor, self._cache.values[layer].tensor
        keys_1GSK, values_1GSK = (pool[slot : slot + 1, :, : mask_11RS.shape[-1]] for pool in pools)
        queries_1GRK = queries_HTK.unflatten(0, (self._cache.heads, -1)).flatten(1, 2)[None]
        found_1GRK = scaled_dot_product_attention(queries_1GRK, keys_1GSK, values_1GSK, mask_11RS)
        return found_1GRK.reshape(1, *queries_HTK.shape)
