"""The target's KV cache: slots of sequences, and the number of committed positions of each slot.

A forward appends keys and values after the committed length; only `commit` and `rewind` change that length. A rejected
token is therefore never committed, and the next append overwrites it. A batch is ragged: short rows are padded, and
their padding is overwritten in the same way.

Shapes: N layers, B sequences, T new positions, S attended positions, G key/value heads, K head width.
Does not know: where keys and values lie (`contiguous`, `paged`).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spire.errors import OutOfCapacity
from spire.model.cache import paging
from spire.model.config import ModelConfig


class BatchView(Protocol):
    """A view of the KV cache for one forward over B slots with T new positions each. Implements KeyValues."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)"""

    @property
    def fused(self) -> Sequence[Any]:
        """Attention by a backend's kernels; empty unless the kernels support every row."""

    @property
    def positions_BT(self) -> Tensor: ...

    @property
    def columns_1S(self) -> Tensor:
        """The positions of a slot that `see` decides about."""

    def see(self, visible_BTS: Tensor) -> None:
        """Set the mask: the positions of its slot that each new position attends to. Not for fused attention."""

    def store(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        """Write one layer's new keys and values after the committed positions, unless a fused kernel writes them."""

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        """Store one layer's new keys and values; return its attention [B, H, T, K], causal or masked by `see`."""


class TargetCache(ABC):
    """Slots for `slots` sequences of up to `capacity` committed positions, in memory of a fixed number of pages.

    `parking` more slots follow, which `allocate` never returns: ended sequences are copied to them for reuse.
    `budget` is the memory's size in bytes; None: as much as all slots need. Raises OutOfCapacity if it is too little
    for one sequence.
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
        self.page = page = self._page_size()
        self.lengths = [0] * (slots + parking)
        # Pages of the longest sequence.
        self.pages = -(-paging.positions_of(capacity) // page)
        self.layers, self.heads, self.width = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        self.page_bytes = 2 * self.layers * self.heads * page * self.width * dtype.itemsize
        self._budget = self.pages * slots if budget is None else budget // self.page_bytes
        if self._budget < self.pages:
            raise OutOfCapacity(
                f"{(budget or 0) / 1e6:.1f} MB are too little for one sequence of {capacity} positions: "
                f"{self.pages * self.page_bytes / 1e6:.1f} MB are needed"
            )
        self._free = list(range(slots))
        # The keys and values of each layer, as rows of one position and head, [rows, K] each.
        self.pools: Sequence[tuple[Tensor, Tensor]] = ()
        self._allocate(dtype)

    @staticmethod
    @abstractmethod
    def _page_size() -> int:
        """Return the number of positions of a page."""

    @abstractmethod
    def _allocate(self, dtype: torch.dtype) -> None:
        """Create the memory and set `pools`. Called once, by the constructor."""

    # --- memory ---------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """The KV cache's budget in bytes."""
        return self._budget * self.page_bytes

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """The bytes that may be backed by memory."""

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """The bytes reserved for live sequences. Any thread may read this property."""

    @property
    @abstractmethod
    def parked_bytes(self) -> int:
        """The bytes reserved for ended sequences in parking slots alone. Any thread may read this property."""

    @property
    def usage(self) -> float:
        """The share of the budget, in [0, 1], reserved for live sequences. Any thread may read this property."""
        return self.live_bytes / self.bytes

    @abstractmethod
    def may_park(self, place: int, length: int) -> bool:
        """True if parking slot `place` may hold `length` positions: at most half of the memory is for parking slots."""

    @abstractmethod
    def reserve(self, slots: Sequence[int], new_tokens: int) -> bool:
        """Reserve memory for `new_tokens` more positions in each slot, or reserve nothing and return False."""

    @abstractmethod
    def empty(self, slot: int) -> None:
        """Discard the content of a slot and release its memory."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to `target`. Raises OutOfCapacity if memory is short."""

    def _pages_for(self, length: int) -> int:
        return min(self.pages, -(-length // self.page))

    # --- slots ----------------------------------------------------------------------------------------------------

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
        """Free a slot. `scrub`: its sequence computed non-finite values, which nobody must read."""
        self._release(slot, scrub)
        self.lengths[slot] = 0
        heapq.heappush(self._free, slot)

    @abstractmethod
    def _release(self, slot: int, scrub: bool) -> None:
        """Release the memory of a sequence that has ended."""

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Reduce committed lengths, as after rejected draft tokens. Raises OutOfCapacity for a larger length."""
        for slot, length in zip(slots, lengths, strict=True):
            if length > self.lengths[slot]:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, not the {length} to go back to")
            self.lengths[slot] = length

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Commit the first counts[i] appended positions of slots[i]. Raises OutOfCapacity beyond `capacity`."""
        for slot, count in zip(slots, counts, strict=True):
            if self.lengths[slot] + count > self.capacity:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, {count} more do not fit")
            self.lengths[slot] += count

    # --- keys and values ------------------------------------------------------------------------------------------

    def view(self, slots: Sequence[int], new_tokens: int, decoding: bool = False, causal: bool = True) -> BatchView:
        """Return a view of the cache for one forward that appends `new_tokens` positions to each slot.

        `decoding`: the positions are not part of a prompt. Kernels for few queries are used only if it is True: one
        kernel attends for chunks of any length, so that on a CPU a prompt's keys do not depend on where chunks end. If
        `causal` is False, the caller must set the attention mask by `see`. Raises OutOfCapacity if memory is short.
        """
        if not self.reserve(slots, new_tokens):
            raise OutOfCapacity(f"no memory for {new_tokens} more positions of {len(slots)} sequences")
        return self._view(slots, new_tokens, decoding, causal)

    @abstractmethod
    def _view(self, slots: Sequence[int], new_tokens: int, decoding: bool, causal: bool) -> BatchView: ...

    def load(self, lengths: Sequence[int], keys_NBGSK: Tensor, values_NBGSK: Tensor) -> None:
        """Replace the content of the first B slots, allocated or not, by keys and values of S positions.

        `lengths` of them are committed; the numbers at the others must be finite. Raises OutOfCapacity if memory is
        short.
        """
        slots, S = range(len(lengths)), keys_NBGSK.shape[3]
        self.rewind(slots, [0] * len(lengths))
        if not self.reserve(slots, S):
            raise OutOfCapacity(f"no memory for {S} positions of {len(lengths)} sequences")
        self._load(keys_NBGSK, values_NBGSK)
        self.commit(slots, lengths)

    @abstractmethod
    def _load(self, keys_NBGSK: Tensor, values_NBGSK: Tensor) -> None:
        """Write the first S positions of the first B slots."""

    @abstractmethod
    def rows(self, slots: Sequence[int], positions_BS: Tensor) -> Tensor:
        """Return the row of each head at these positions of each slot, [B, S, G]."""

    def gather(self, slots: Sequence[int], positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of all N layers' keys and values at S committed positions per slot, each [N, B, G, S, K]."""
        rows_BGS = self.rows(slots, positions_BS).transpose(1, 2).contiguous()
        first = self.pools[0][0]
        copies = first.new_empty(2, self.layers, *rows_BGS.shape, self.width)
        for layer, pair in enumerate(self.pools):
            for pool_RK, copy in zip(pair, copies[:, layer], strict=True):
                torch.index_select(pool_RK, 0, rows_BGS.flatten(), out=copy.view(-1, self.width))
        return copies[0], copies[1]
