"""The KV cache on a GPU: pages of 64 positions in one allocation, and a page table for each slot.

A sequence takes pages as it grows, so memory is not reserved for the longest context. A copy shares the pages of its
source: a page counts its slots, and is copied when one of several slots is about to write to it. Two sequences of one
prefix thus hold the prefix once.

Shapes: N layers, P pages, X slots, B sequences, T new positions, S attended positions, G key/value heads, H query
heads, L positions of a page, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from spire.model.attention.triton_kernels import attention_kernels
from spire.model.cache import paging
from spire.model.cache.target_cache import TargetCache
from spire.model.layers import additive, attend


class PageTables:
    """Which page holds which positions of each slot, and how many slots hold each page. The first `slots` are live."""

    def __init__(self, slots: int, all_slots: int, pages: int, of_a_slot: int):
        self.slots = slots
        # A page behind all others that no slot holds: padding is written to it.
        self.padding_page = pages
        # The first entries of a slot's row are its pages, `counts` of them; the others are the padding page.
        self.table_XP = np.full((all_slots, of_a_slot), pages, dtype=np.int32)
        self.counts = [0] * all_slots
        # By page, the number of live slots and of parking slots that hold it.
        self._live, self._parked = [0] * pages, [0] * pages
        self._free = list(range(pages))[::-1]
        # The number of pages held by a live slot, and by parking slots alone.
        self.live = self.parked = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return the number of slots that hold this page."""
        return self._live[page] + self._parked[page]

    def is_shared(self, slot: int, entry: int) -> bool:
        return self.holders(self.table_XP[slot, entry]) > 1

    def shared(self, slot: int, first: int, end: int) -> list[int]:
        """Return the entries of a slot, from `first` to `end` - 1, whose pages other slots hold, too."""
        return [entry for entry in range(first, min(end, self.counts[slot])) if self.is_shared(slot, entry)]

    def grow(self, slot: int, pages: int) -> None:
        """Add free pages to a slot until it has `pages`."""
        for entry in range(self.counts[slot], pages):
            self._set(slot, entry, self._free.pop())
        self.counts[slot] = max(self.counts[slot], pages)

    def replace(self, slot: int, entry: int) -> tuple[int, int]:
        """Give a slot a free page in the place of a shared one. Return the former page and the new one."""
        former, new = int(self.table_XP[slot, entry]), self._free.pop()
        self._leave(slot, former)
        self._set(slot, entry, new)
        return former, new

    def share(self, source: int, target: int, pages: int) -> None:
        """Let a slot hold the first `pages` pages of another slot, in the place of its own."""
        for entry in range(pages):
            page = int(self.table_XP[source, entry])
            self._count(target, page, 1)  # first, so that a page that both hold does not become free
            if entry < self.counts[target]:
                self._leave(target, int(self.table_XP[target, entry]))
            self.table_XP[target, entry] = page
        self.counts[target] = max(pages, self.counts[target])

    def drop(self, slot: int) -> None:
        """Take all pages from a slot. A page that no slot holds is free again."""
        for page in self.table_XP[slot, : self.counts[slot]].tolist():
            self._leave(slot, page)
        self.table_XP[slot, : self.counts[slot]] = self.padding_page
        self.counts[slot] = 0

    def _set(self, slot: int, entry: int, page: int) -> None:
        self._count(slot, page, 1)
        self.table_XP[slot, entry] = page

    def _leave(self, slot: int, page: int) -> None:
        self._count(slot, page, -1)
        if not self.holders(page):
            self._free.append(page)

    def _count(self, slot: int, page: int, change: int) -> None:
        """Change the number of slots of this slot's kind, live or parking, that hold a page."""
        was_live, was_parked = self._live[page] > 0, self._parked[page] > 0 and not self._live[page]
        (self._live if slot < self.slots else self._parked)[page] += change
        self.live += (self._live[page] > 0) - was_live
        self.parked += (self._parked[page] > 0 and not self._live[page]) - was_parked


class PagedCache(TargetCache):
    """A KV cache of pages [N, 2, P, G, L, K]: keys are at index 0, values at index 1. The last page is for padding."""

    @staticmethod
    def _page_size() -> int:
        return paging.GPU_PAGE

    def _allocate(self, dtype: torch.dtype) -> None:
        shape = (self.layers, 2, self._budget + 1, self.heads, self.page, self.width)
        # Not zeroed: nothing reads a position before it is written.
        self.pages_N2PGLK = torch.empty(shape, dtype=dtype, device=self.device)
        self.pools = [(keys, values) for keys, values in self.pages_N2PGLK.view(self.layers, 2, -1, self.width)]
        self.tables = PageTables(self.slots, len(self.lengths), self._budget, self.pages)
        # Attention kernels for few queries, or None.
        self.kernels = attention_kernels(self.pages_N2PGLK[0, 0], self.queries_per_key)

    @property
    def held_bytes(self) -> int:
        return (self._budget - self.tables.free) * self.page_bytes

    @property
    def live_bytes(self) -> int:
        """The bytes of pages that live sequences hold. A page of several sequences counts once."""
        return self.tables.live * self.page_bytes

    @property
    def parked_bytes(self) -> int:
        return self.tables.parked * self.page_bytes

    def may_park(self, place: int, length: int) -> bool:
        return self.tables.parked + self._pages_for(length) <= self._budget // 2

    def reserve(self, slots: Sequence[int], new_tokens: int) -> bool:
        wanted = [(slot, self._pages_for(self.lengths[slot] + new_tokens)) for slot in slots]
        written = [(slot, self.lengths[slot] // self.page, end) for slot, end in wanted]
        copied = [(slot, entry) for slot, first, end in written for entry in self.tables.shared(slot, first, end)]
        added = sum(max(0, end - self.tables.counts[slot]) for slot, end in wanted)
        if len(copied) + added > self.tables.free:
            return False
        for slot, end in wanted:
            self.tables.grow(slot, end)
        # A page whose other holders have just been given copies is not shared any more.
        pairs = [self.tables.replace(slot, entry) for slot, entry in copied if self.tables.is_shared(slot, entry)]
        if pairs:
            self._copy_pages(pairs)
        return True

    def _copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the keys and values of pages (source, target), in all layers."""
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        self.pages_N2PGLK[:, :, targets] = self.pages_N2PGLK[:, :, sources]

    def _release(self, slot: int, scrub: bool) -> None:
        self.tables.drop(slot)

    def empty(self, slot: int) -> None:
        self.lengths[slot] = 0
        self.tables.drop(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let slot `target` hold the first `length` positions of slot `source`, instead of its own.

        Takes no memory until either grows. What `target` has reserved behind these positions stays reserved.
        """
        reserved = self.tables.counts[target] * self.page
        self.tables.share(source, target, self._pages_for(length))
        self.lengths[target] = length
        if reserved > length:
            # Copies a page that both have begun. Its place is one of those that `target` has just left.
            self.reserve([target], reserved - length)

    def _view(self, slots: Sequence[int], new_tokens: int, decoding: bool, causal: bool) -> PagedView:
        kernels = self.kernels if causal and decoding else None
        if kernels and not kernels.attends(self.queries_per_key, new_tokens, self.width):
            kernels = None
        lengths = [self.lengths[slot] for slot in slots]
        pages = min(self.pages, -(-(max(lengths) + new_tokens) // self.page))
        table_BP, lengths_B = self.table(slots, pages), torch.tensor(lengths, device=self.device)
        if causal and not decoding:
            return PromptView(self, table_BP, lengths_B, lengths, new_tokens)
        return PagedView(self, table_BP, lengths_B, new_tokens, kernels, decoding and causal)

    def _load(self, keys_NBGSK: Tensor, values_NBGSK: Tensor) -> None:
        B, S = keys_NBGSK.shape[1], keys_NBGSK.shape[3]
        rows_BSG = self.rows(range(B), torch.arange(S, device=self.device).expand(B, S))
        new_N2RK = torch.stack((keys_NBGSK, values_NBGSK), dim=1).flatten(2, 4)
        pages_N2RK = self.pages_N2PGLK.view(self.layers, 2, -1, self.width)
        pages_N2RK.index_copy_(2, rows_BSG.transpose(1, 2).flatten(), new_N2RK)

    def rows(self, slots: Sequence[int], positions_BS: Tensor) -> Tensor:
        return self.rows_of(self.table(slots, self.pages), positions_BS)

    def rows_of(self, table_BP: Tensor, positions_BS: Tensor) -> Tensor:
        pages_BS1 = table_BP.long().gather(1, positions_BS // self.page)[..., None]
        heads_G = torch.arange(self.heads, device=self.device)
        return (pages_BS1 * self.heads + heads_G) * self.page + positions_BS[..., None] % self.page

    def table(self, slots: Sequence[int], pages: int) -> Tensor:
        """Return the page table of these slots, int32 [B, pages], on the cache's device."""
        return torch.from_numpy(self.tables.table_XP[list(slots), :pages]).to(self.device)


class PagedView:
    """A view of B sequences with the page table `table_BP` (int32) and `lengths_B` committed positions.

    Implements BatchView. Reads no tensor, so it can be made within a CUDA graph.
    """

    fused: Sequence[Any] = ()

    def __init__(
        self,
        cache: PagedCache,
        table_BP: Tensor,
        lengths_B: Tensor,
        new_tokens: int,
        kernels: ModuleType | None,
        decoding: bool,
    ):
        self.cache, self.kernels, self.decoding = cache, kernels, decoding
        self.table_BP, self.lengths_B, self.shape = table_BP, lengths_B, (len(lengths_B), new_tokens)
        self.positions_BT = lengths_B[:, None] + torch.arange(new_tokens, device=cache.device)
        # All padding of a nearly full row is written to the last column, which is never committed.
        columns_BT = self.positions_BT.clamp(max=cache.pages * cache.page - 1)
        self.rows_RG = cache.rows_of(table_BP, columns_BT).flatten(0, 1)
        self._prepare(columns_BT)

    def _prepare(self, columns_BT: Tensor) -> None:
        """Make what attention needs besides the page table: the lengths for kernels, or a mask."""
        if self.kernels:
            self._lengths_B = self.lengths_B.int()
            return
        self.columns_1S = torch.arange(self.table_BP.shape[1] * self.cache.page, device=self.cache.device)[None]
        self.see(self.columns_1S[:, None] <= columns_BT[..., None])

    def see(self, visible_BTS: Tensor) -> None:
        self._mask_B1TS = additive(visible_BTS, self.cache.pages_N2PGLK.dtype)
        # Positions that no query sees may never have been written, and a masked NaN would still spread.
        self._unseen_B1S1 = ~visible_BTS.any(dim=1)[:, None, :, None]

    def store(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        for pool_RK, new_BGTK in zip(self.cache.pools[layer], (keys_BGTK, values_BGTK), strict=True):
            pool_RK.index_copy_(0, self.rows_RG.flatten(), new_BGTK.transpose(1, 2).reshape(-1, pool_RK.shape[-1]))

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        self.store(layer, keys_BGTK, values_BGTK)
        return self.attend_stored(layer, queries_BHTK)

    def attend_stored(self, layer: int, queries_BHTK: Tensor) -> Tensor:
        """Return the attention output [B, H, T, K] of new positions whose keys and values are in the cache already."""
        keys, values = self.cache.pages_N2PGLK[layer]
        if self.kernels:
            found: Tensor = self.kernels.attend(queries_BHTK, keys, values, self.table_BP, self._lengths_B)
            return found
        return attend(queries_BHTK, self._gathered(keys), self._gathered(values), self._mask_B1TS)

    def _gathered(self, pages_PGLK: Tensor) -> Tensor:
        """Return a copy of the slots' pages as [B, G, S, K], zero at positions that no query sees."""
        pages_BPGLK = pages_PGLK[self.table_BP.long()]
        return pages_BPGLK.transpose(1, 2).flatten(2, 3).masked_fill(self._unseen_B1S1, 0)


class PromptView(PagedView):
    """A view for a chunk of prompts, for which torch's flash kernel attends sequence by sequence."""

    def __init__(self, cache: PagedCache, table_BP: Tensor, lengths_B: Tensor, lengths: Sequence[int], new_tokens: int):
        self._lengths = lengths
        super().__init__(cache, table_BP, lengths_B, new_tokens, None, decoding=False)

    def _prepare(self, columns_BT: Tensor) -> None:
        """Nothing: the flash kernel needs no mask."""

    def attend_stored(self, layer: int, queries_BHTK: Tensor) -> Tensor:
        page, found_BHTK = self.cache.page, torch.zeros_like(queries_BHTK)
        for row, length in enumerate(self._lengths):
            # Padding behind the last position of a slot has no place of its own, and nobody reads its output.
            end = min(length + self.shape[1], self.cache.pages * page)
            pages_P, new = self.table_BP[row, : -(-end // page)].long(), end - length
            keys, values = (
                pages_PGLK[pages_P].transpose(0, 1).flatten(1, 2)[None, :, :end]
                for pages_PGLK in self.cache.pages_N2PGLK[layer]
            )
            queries, mask = queries_BHTK[row : row + 1, :, :new], causal_lower_right(new, end)
            found_BHTK[row, :, :new] = scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)[0]
        return found_BHTK
