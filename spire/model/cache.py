"""The target's cache: a block table whose blocks, on a CPU, are pages of four neighbouring slots.

A page holds C positions of each slot of its group, head by head, and the pages of a group follow one another: what four
neighbours hold up to any page is contiguous, so it takes one matrix product, reads as many pages as the longest of the
four needs, and nothing is gathered or copied. What one of them holds is evenly spread: in float32 that is multiplied
where it lies, too. A slot has room for the longest sequence, but only as address space: memory comes when a page is
first written and goes when its sequence does, so what is held is what sequences fill, and a `budget` bounds it (as
vAttention does on a GPU).
`attend` writes behind the committed length; `commit` alone moves that length on, and `rewind` back. So a rejected token
is simply never committed, and the next append overwrites it. A batch is ragged: short rows are padded, their padding
likewise.

Shapes: N groups of X slots, P pages of C positions, B sequences, T new positions, S attended positions, G key/value
heads, K head width, R rows of a forward over several views.
What it does not know: pages on a GPU, where a slot is one page and all of it is allocated from the start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from spire.errors import OutOfCapacity
from spire.model.config import ModelConfig
from spire.model.layers import additive, attend
from spire.model.pool import Pool

# Positions per page and slots per group on a CPU. On a GPU one page and one group hold everything: kernels there read
# a stretch without copying it.
_PAGE, _GROUP = 128, 4
# From which share of its pages on a group is read whole together with its neighbours: what a product costs to begin is
# more than reading the rest.
_NEARLY_FULL = 0.85


class TargetCache:
    """Keys and values of `slots` sequences of up to `capacity` committed positions each, in `budget` bytes at most.

    `parking` more slots follow: they are never allocated, only copied to and from.
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
        # At least one column more than can be committed: there the padding of full rows goes.
        pages = capacity // _PAGE + 1
        self.paged = self._has_pages(self.device)
        self.pages, self.page = (pages, _PAGE) if self.paged else (1, pages * _PAGE)
        self.group = _GROUP if self.paged else 1
        self.in_place = self.paged and self._in_place(dtype)
        groups = -(-len(self.lengths) // self.group)
        shape = (groups, self.pages, config.num_key_value_heads, self.group, self.page, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [Pool(shape, dtype, device, transposed=self.in_place) for _ in layers]
        self.values = [Pool(shape, dtype, device) for _ in layers]
        self.page_bytes = sum(pool.page_bytes for pool in self._pools)
        self._budget = self.pages * slots if budget is None else budget // self.page_bytes
        if self._budget < self.pages:
            raise OutOfCapacity(
                f"{(budget or 0) / 1e6:.1f} MB are too little for one sequence of {capacity} positions: "
                f"it needs {self.pages * self.page_bytes / 1e6:.1f} MB"
            )
        # Pages of each slot that are, or may be, backed by memory.
        self._held = [0] * len(self.lengths)
        self._free = list(range(slots))

    @staticmethod
    def _has_pages(device: torch.device) -> bool:
        return device.type == "cpu"

    @staticmethod
    def _in_place(dtype: torch.dtype) -> bool:
        """Whether keys are transposed, one slot is read without a copy, and pages' weights are left unnormalised."""
        return dtype == torch.float32  # in bfloat16 scores are too coarse for it, and products of copies faster

    @property
    def _pools(self) -> list[Pool]:
        return [*self.keys, *self.values]

    @property
    def bytes(self) -> int:
        """What it may come to hold."""
        return self._budget * self.page_bytes

    @property
    def held_bytes(self) -> int:
        """What is promised to the sequences there are, and kept of those that were."""
        return sum(self._held) * self.page_bytes

    @property
    def live_bytes(self) -> int:
        """What is promised to the sequences there are. Any thread may ask."""
        free = set(self._free)
        return sum(pages for slot, pages in enumerate(self._held[: self.slots]) if slot not in free) * self.page_bytes

    @property
    def usage(self) -> float:
        """Share of it, in [0, 1], that the sequences there are have been promised. Any thread may ask."""
        return self.live_bytes / self.bytes

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """The lowest free slot, so that sequences stay neighbours. Raises OutOfCapacity when all are taken."""
        if not self._free:
            raise OutOfCapacity(f"all {self.slots} sequences that this verifier can hold are taken")
        slot = heapq.heappop(self._free)
        self.lengths[slot] = 0
        return slot

    def free(self, slot: int, scrub: bool = False) -> None:
        """Give a slot back. `scrub` clears it, for a sequence whose numbers were not finite.

        Its memory stays for whoever takes the slot next, until another one needs it.
        """
        if scrub:
            for pool in self._pools:
                pool.of(slot).zero_()
        self.lengths[slot] = 0
        heapq.heappush(self._free, slot)

    def empty(self, slot: int) -> None:
        """Forget what a slot holds and give its memory back."""
        for pool in self._pools:
            pool.release(slot, self._held[slot])
        self.lengths[slot] = self._held[slot] = 0

    def reserve(self, slots: Sequence[int], new_tokens: int) -> bool:
        """Promise each of these slots memory for `new_tokens` more positions, or none of them: False."""
        needed = {slot: min(self.pages, -(-(self.lengths[slot] + new_tokens) // self.page)) for slot in slots}
        more = sum(max(0, pages - self._held[slot]) for slot, pages in needed.items())
        if more and sum(self._held) + more > self._budget:
            for slot in self._free:
                self.empty(slot)
        if more and sum(self._held) + more > self._budget:
            return False
        for slot, pages in needed.items():
            self._held[slot] = max(self._held[slot], pages)
        return True

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` hold what `source` holds up to `length`. Raises OutOfCapacity when there is no memory."""
        self.lengths[target] = 0
        if not self.reserve([target], length):
            raise OutOfCapacity(f"no memory for a copy of {length} positions")
        pages, columns = -(-length // self.page), min(length, self.page)
        for pool in self._pools:
            pool.of(target)[:pages, :, :columns] = pool.of(source)[:pages, :, :columns]
        self.lengths[target] = length

    def rewind(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Take back what a slot holds from `lengths` on: a draft's guesses stay only until they are verified."""
        for slot, length in zip(slots, lengths, strict=True):
            if length > self.lengths[slot]:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, not the {length} to go back to")
            self.lengths[slot] = length

    def view(self, slots: Sequence[int], new_tokens: int) -> BatchView:
        """What one forward needs to append `new_tokens` positions to each of these slots.

        Raises OutOfCapacity when there is no memory for them.
        """
        if not self.reserve(slots, new_tokens):
            raise OutOfCapacity(f"no memory for {new_tokens} more positions of {len(slots)} sequences")
        return BatchView(self, slots, new_tokens)

    def gather(self, slots: Sequence[int], positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of all N layers' keys and values at chosen committed positions of these slots, [N, B, G, S, K]."""
        slots_B1 = torch.tensor(slots, device=positions_BS.device)[:, None]
        places_BGS = self.places(slots_B1, positions_BS).transpose(1, 2).contiguous()
        gathered = []
        for pools in (self.keys, self.values):
            copies_NBGSK = pools[0].tensor.new_empty(len(pools), *places_BGS.shape, pools[0].tensor.shape[-1])
            for pool, copy in zip(pools, copies_NBGSK, strict=True):
                pool.read(places_BGS, copy)
            gathered.append(copies_NBGSK)
        return gathered[0], gathered[1]

    def places(self, slots_B1: Tensor, positions_BT: Tensor) -> Tensor:
        """Where the keys of these positions stand, [B, T, G], in a pool seen as a list of single keys."""
        _, P, G, X, C, _ = self.keys[0].tensor.shape
        slots_BT1, positions_BT1 = slots_B1[..., None], positions_BT[..., None]
        pages_BT1 = slots_BT1 // X * P + positions_BT1 // C
        heads_G = torch.arange(G, device=positions_BT.device)
        return ((pages_BT1 * G + heads_G) * X + slots_BT1 % X) * C + positions_BT1 % C

    def commit(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Make the first counts[i] appended positions of each slot part of its sequence."""
        for slot, count in zip(slots, counts, strict=True):
            if self.lengths[slot] + count > self.capacity:
                raise OutOfCapacity(f"slot {slot} holds {self.lengths[slot]} positions, {count} more do not fit")
            self.lengths[slot] += count


class BatchView:
    """The cache during one forward over some slots, T new positions each: implements the target's KeyValues."""

    def __init__(self, cache: TargetCache, slots: Sequence[int], new_tokens: int):
        self._cache = cache
        lengths = [cache.lengths[slot] for slot in slots]
        last_column = cache.pages * cache.page - 1
        device = cache.device
        slots_B1 = torch.tensor(slots, device=device)[:, None]
        self.positions_BT = torch.tensor(lengths, device=device)[:, None] + torch.arange(new_tokens, device=device)
        # Padding of a row that is nearly full piles up in the last column, which is never committed.
        columns_BT = self.positions_BT.clamp(max=last_column)
        self._places_R = cache.places(slots_B1, columns_BT).flatten()
        needed = [min(length + new_tokens, last_column + 1) for length in lengths]
        self._reads, rows = _plan_reads(slots, needed, cache)
        self._rows_B = torch.tensor(rows, device=device)
        self._size = self._reads[-1].rows.stop
        self._whole = rows == list(range(self._size))
        columns = max(read.pages for read in self._reads) * cache.page if cache.paged else max(needed)
        self.columns_1S = torch.arange(columns, device=device)[None]
        # Whole pages that everybody sees need no mask.
        first = min(lengths) // cache.page * cache.page
        self.see(self.columns_1S[:, None, first:] <= columns_BT[..., None])

    def see(self, visible_BTS: Tensor) -> None:
        """Let each new position attend to these of the last columns, and to all before them."""
        self._mask_B1TS = self._placed(additive(visible_BTS, self._cache.keys[0].tensor.dtype))
        self._masks = [self._by_page(read) for read in self._reads] if self._cache.in_place else []

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        """Store the new positions of one layer; what its queries find in all positions up to their own."""
        self.store(layer, keys_BGTK, values_BGTK)
        keys, values = self._cache.keys[layer].tensor, self._cache.values[layer].tensor
        if not self._cache.paged:
            columns = self.columns_1S.shape[1]
            keys, values = (pool[:, 0, :, 0].index_select(0, self._rows_B)[:, :, :columns] for pool in (keys, values))
            return attend(queries_BHTK, keys, values, self._mask_B1TS)
        attended = self._attend_pages(self._placed(queries_BHTK), keys, values)
        return attended if self._whole else attended[self._rows_B]

    def store(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        """Write the new positions of one layer behind what is committed."""
        for pool, new_BGTK in ((self._cache.keys[layer], keys_BGTK), (self._cache.values[layer], values_BGTK)):
            pool.write(self._places_R, new_BGTK.transpose(1, 2).reshape(-1, new_BGTK.shape[-1]))

    def _attend_pages(self, queries_BHTK: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries of one group of heads become rows of its products: each key and value byte is read once."""
        B, H, T, K = queries_BHTK.shape
        queries_BGRK = queries_BHTK.reshape(B, keys.shape[2], -1, K) * K**-0.5
        if self._cache.in_place:
            attended = self._attend_in_place(queries_BGRK, keys, values)
        else:
            attended = self._attend_at_once(queries_BGRK, keys, values)
        return (attended[0] if len(attended) == 1 else torch.cat(attended)).reshape(B, H, T, K)

    def _attend_in_place(self, queries_BGRK: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Scores become weights where the first product left them, and the second product takes them from there."""
        queries_BGRK = queries_BGRK * math.log2(math.e)  # exp2 is as fast for what is masked; exp is not
        attended = []
        for read, mask_NPGXHTC in zip(self._reads, self._masks, strict=True):
            queries_NPGXRK = read.repeated(queries_BGRK)
            scores = _product(queries_NPGXRK, read.of(keys).mT)
            last, T = mask_NPGXHTC.shape[1], mask_NPGXHTC.shape[-2]
            scores.unflatten(4, (-1, T))[:, read.pages - last :].add_(mask_NPGXHTC)
            weights = scores.sub_(scores.amax((1, 5), keepdim=True)).exp2_()
            found_NGXRK = _product(weights, read.of(values)).sum(1) / weights.sum((1, 5))[..., None]
            attended.append(found_NGXRK.transpose(1, 2).flatten(0, 1))
        return attended

    def _attend_at_once(self, queries_BGRK: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Two products for each stretch that is read, over all its pages at once, and one softmax for all.

        A product costs as much to begin as to read some hundred keys.
        """
        C = self._cache.page
        scores = queries_BGRK.new_empty(*queries_BGRK.shape[:3], self.columns_1S.shape[1])
        by_read = []
        for read in self._reads:
            mine = scores[read.rows].unflatten(0, (-1, read.size)).unflatten(-1, (-1, C))
            by_page = mine.permute(0, 4, 2, 1, 3, 5)  # as in memory: [N, P, G, X, R, C]
            by_page[:, : read.pages] = _product(read.repeated(queries_BGRK), read.of(keys).contiguous().mT)
            by_page[:, read.pages :] = torch.finfo(scores.dtype).min
            by_read.append(by_page[:, : read.pages])
        mask_B1TS = self._mask_B1TS
        scores.unflatten(2, (-1, mask_B1TS.shape[2]))[..., -mask_B1TS.shape[-1] :].add_(mask_B1TS[:, :, None])
        weights = scores.softmax(dim=-1)
        attended = []
        for read in self._reads:
            mine = weights[read.rows].unflatten(0, (-1, read.size)).unflatten(-1, (-1, C))
            by_page = mine.permute(0, 4, 2, 1, 3, 5)[:, : read.pages]
            found_NGXRK = _product(by_page, read.of(values).contiguous()).sum(1)
            attended.append(found_NGXRK.transpose(1, 2).flatten(0, 1))
        return attended

    def _by_page(self, read: _Read) -> Tensor:
        """The mask of a read's last pages, as it is added to scores [N, P, G, X, H / G, T, C]."""
        C = self._cache.page
        mask_NXTS = self._mask_B1TS[read.rows, 0].unflatten(0, (-1, read.size))
        seen_by_all = self.columns_1S.shape[1] - mask_NXTS.shape[3]
        mask_NXTS = torch.nn.functional.pad(mask_NXTS, (seen_by_all % C, 0)).unflatten(3, (-1, C))
        mask_NXTPC = mask_NXTS[..., : max(0, read.pages - seen_by_all // C), :]
        return mask_NXTPC.permute(0, 3, 1, 2, 4)[:, :, None, :, None]

    def _placed(self, x_B: Tensor) -> Tensor:
        """Rows of the batch where they are read; what else is read attends for nothing."""
        if self._whole or not self._cache.paged:
            return x_B
        return x_B.new_zeros(self._size, *x_B.shape[1:]).index_copy_(0, self._rows_B, x_B)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Of all matrices of one [N, P, G, X, ...] with those of the other."""
    return x.flatten(0, 3).bmm(y.flatten(0, 3)).view(*x.shape[:5], y.shape[-1])


@dataclass(frozen=True)
class _Read:
    """`size` slots from `first` on of each of some neighbouring `groups`, which fill these `rows`, as far as their
    longest sequence reaches. Several groups are read to the end of their pages, where they touch."""

    group: int
    groups: int
    first: int
    size: int
    pages: int
    rows: slice

    def of(self, pool: Tensor) -> Tensor:
        return pool[self.group : self.group + self.groups, : self.pages, :, self.first : self.first + self.size]

    def repeated(self, queries_BGRK: Tensor) -> Tensor:
        """The queries of these rows for each page, [N, P, G, X, R, K]."""
        queries_NXGRK = queries_BGRK[self.rows].unflatten(0, (-1, self.size))
        return queries_NXGRK.transpose(1, 2)[:, None].expand(-1, self.pages, -1, -1, -1, -1)


def _plan_reads(slots: Sequence[int], needed: Sequence[int], cache: TargetCache) -> tuple[list[_Read], list[int]]:
    """What to read for these slots, and the row of each slot in it.

    A group is contiguous and read whole. In place a part of it need not be, else one slot is cheaper to copy than to
    read its group. Neighbours that are nearly full are one read.
    """
    if not cache.paged:
        return [_Read(0, 1, 0, len(slots), 1, slice(0, len(slots)))], list(slots)
    pages = [-(-positions // cache.page) for positions in needed]
    members: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        members.setdefault(slot // cache.group, []).append(row)
    parts: list[tuple[int, int, int, list[int]]] = []
    for group, mine in sorted(members.items()):
        if len(mine) == cache.group or (len(mine) > 1 and not cache.in_place):
            parts.append((group, 0, cache.group, mine))
        else:
            parts += [(group, slots[row] % cache.group, 1, [row]) for row in mine]
    reads: list[_Read] = []
    rows, end = [0] * len(slots), 0
    for group, first, size, mine in sorted(parts, key=lambda part: part[2] == 1):
        read = _Read(group, 1, first, size, max(pages[row] for row in mine), slice(end, end + size))
        for row in mine:
            rows[row] = end + slots[row] % cache.group - first
        reads = [*reads[:-1], *_joined(reads[-1], read, cache)] if reads else [read]
        end += size
    return reads, rows


def _joined(one: _Read, next_: _Read, cache: TargetCache) -> list[_Read]:
    """Both as one read if they touch and little is read in vain, else as they are."""
    touch = one.group + one.groups == next_.group and one.size == next_.size == cache.group
    if not touch or min(one.pages, next_.pages) < cache.pages * _NEARLY_FULL:
        return [one, next_]
    rows = slice(one.rows.start, next_.rows.stop)
    return [_Read(one.group, one.groups + 1, 0, cache.group, cache.pages, rows)]


class Stretches:
    """Several views in one forward, their rows one after the other as one row of R positions: also a KeyValues.

    Weights are read once for all of them; each attends for itself.
    """

    def __init__(self, views: Sequence[BatchView]):
        self._views = views
        self.positions_BT = torch.cat([view.positions_BT.flatten() for view in views])[None]
        ends = accumulate((view.positions_BT.numel() for view in views), initial=0)
        self._rows = [slice(*bounds) for bounds in pairwise(ends)]

    def attend(self, layer: int, queries_1HRK: Tensor, keys_1GRK: Tensor, values_1GRK: Tensor) -> Tensor:
        attended = []
        for view, rows in zip(self._views, self._rows, strict=True):
            stretch = [
                x[0, :, rows].unflatten(1, view.positions_BT.shape).transpose(0, 1)
                for x in (queries_1HRK, keys_1GRK, values_1GRK)
            ]
            attended.append(view.attend(layer, *stretch).transpose(0, 1).flatten(1, 2))
        return torch.cat(attended, dim=1)[None]

    def split(self, of_1R: Tensor) -> list[Tensor]:
        """What a forward gave for R rows [1, R, ...], by view: [B, T, ...]."""
        return [
            of_1R[0, rows].unflatten(0, view.positions_BT.shape)
            for view, rows in zip(self._views, self._rows, strict=True)
        ]
