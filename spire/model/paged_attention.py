"""Attention over a CPU's pages: what is read together, and how.

Neighbouring slots with some queries each are read together, by two matrix products over all their pages. In bfloat16
whoever has a single query, or many, and a slot without its neighbours are read by the CPU's flash kernel, each page for
itself: the logarithm of its sum tells what a page weighs. Nothing is gathered or copied, and each key and value byte is
read once.

Shapes: N groups of X slots, P pages of C positions, G key/value heads, K head width, B sequences, H query heads, T new
positions, S columns of a mask, R = H / G * T queries of each key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# New positions from which on the flash kernel is as fast as products for neighbours, too.
_MANY = 64
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def has_transposed_keys(dtype: torch.dtype) -> bool:
    """Whether keys are [K, C] in memory. Then they are always multiplied, as the flash kernel cannot read them.

    In float32 few queries are multiplied with such keys half again as fast. In bfloat16 a product first repacks what
    stands at its right, so keys stand at its left, as they are.
    """
    return dtype == torch.float32


class PagedAttention:
    """What T new positions of each of some slots find in the first `needed` positions of theirs."""

    def __init__(
        self,
        slots: Sequence[int],
        needed: Sequence[int],
        new_tokens: int,
        queries_per_key: int,
        pool: Tensor,
    ):
        """`pool`: any layer's keys, [N, P, G, X, C, K]."""
        self._key_heads, group, page = pool.shape[2:5]
        pages = [-(-positions // page) for positions in needed]
        together = new_tokens < _MANY or has_transposed_keys(pool.dtype)
        self._reads, self._order = _plan(slots, pages, group, together)
        self._in_order = self._order == sorted(self._order)
        self._back = sorted(range(len(slots)), key=self._order.__getitem__)
        self._queries_per_key, self._page = queries_per_key, page
        self.columns = max(pages) * page

    def see(self, mask_BTS: Tensor) -> None:
        """Add this to scores of the last S columns; all see those before."""
        mask_BTS = mask_BTS if self._in_order else mask_BTS[self._order]
        first_page, hidden = divmod(self.columns - mask_BTS.shape[2], self._page)
        mask_BRPC = pad(mask_BTS, (hidden, 0)).repeat(1, self._queries_per_key, 1).unflatten(2, (-1, self._page))
        multiplied = has_transposed_keys(mask_BTS.dtype)
        self._ways: list[_Products | _Flash] = []
        for size in sorted({read.size for read in self._reads}, reverse=True):
            reads = [read for read in self._reads if read.size == size]
            if multiplied or (size > 1 and mask_BTS.shape[1] > 1):
                self._ways.append(_Products(reads, mask_BRPC, first_page))
            else:
                self._ways += [_Flash(read, mask_BRPC, first_page, self._key_heads) for read in reads]

    def attend(self, queries_BHTK: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What was found in these pools, [B, H, T, K]."""
        queries_BHTK = queries_BHTK if self._in_order else queries_BHTK[self._order]
        queries_BGRK = queries_BHTK.unflatten(1, (keys.shape[2], -1)).flatten(2, 3)
        found = [way.attend(queries_BGRK[way.rows], keys, values) for way in self._ways]
        found_BGRK = found[0] if len(found) == 1 else torch.cat(found)
        found_BHTK = found_BGRK.reshape(queries_BHTK.shape)
        return found_BHTK if self._in_order else found_BHTK[self._back]


@dataclass(frozen=True)
class _Read:
    """The first pages of `size` slots of a group from `first` on, which stand in these rows."""

    group: int
    first: int
    size: int
    pages: int
    rows: slice

    def of(self, pool: Tensor) -> Tensor:
        """[P, G, X, C, K]."""
        return pool[self.group, : self.pages, :, self.first : self.first + self.size]


def _plan(slots: Sequence[int], pages: Sequence[int], group: int, together: bool) -> tuple[list[_Read], list[int]]:
    """Whole groups, if `together`, then single slots; and the batch's rows in their order."""
    members: dict[int, list[int]] = {}
    for row in sorted(range(len(slots)), key=slots.__getitem__):
        members.setdefault(slots[row] // group, []).append(row)
    whole = [rows for rows in members.values() if together and len(rows) == group]
    single = [[row] for rows in members.values() if not (together and len(rows) == group) for row in rows]
    reads: list[_Read] = []
    order: list[int] = []
    for rows in whole + single:
        at = slice(len(order), len(order) + len(rows))
        reads.append(_Read(*divmod(slots[rows[0]], group), len(rows), max(pages[row] for row in rows), at))
        order += rows
    return reads, order


class _Products:
    """Reads of as many slots each, by a product each; their scores are one tensor [N, P, G, X, R, C].

    Where keys stand at the left, scores are [N, P, G, X, C, R]. Pages that a read has not hold zeros, and are masked.
    """

    def __init__(self, reads: Sequence[_Read], mask_BRPC: Tensor, first_page: int):
        self.rows = slice(reads[0].rows.start, reads[-1].rows.stop)
        self._reads, self._size = reads, reads[0].size
        self._pages = max(read.pages for read in reads)
        self._keys_left = not has_transposed_keys(mask_BRPC.dtype)
        mask_NXRPC = mask_BRPC[self.rows, :, : self._pages - first_page].unflatten(0, (-1, self._size))
        mask_NPGXRC = mask_NXRPC.permute(0, 3, 1, 2, 4)[:, :, None]
        self._first_page, self._mask = first_page, self._placed(mask_NPGXRC).contiguous()

    def attend(self, queries_BGRK: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Scores become weights where the first products left them, and the second take them from there."""
        C = 4 if self._keys_left else 5
        # exp2 is as fast for what is masked; exp of float32 is not.
        queries_BGRK = queries_BGRK * (queries_BGRK.shape[-1] ** -0.5 * math.log2(math.e))
        queries_NXG = self._placed(queries_BGRK).unflatten(0, (-1, self._size))
        queries_NPGX = queries_NXG.transpose(1, 2)[:, None].expand(-1, self._pages, -1, -1, -1, -1).contiguous()
        scores = self._multiplied(queries_NPGX, keys if self._keys_left else keys.mT, self._keys_left)
        scores[:, self._first_page :].add_(self._mask)
        largest = scores.amax(1, keepdim=True)
        largest.copy_(largest.amax(C, keepdim=True))  # written out: to broadcast few queries is slow
        weights = scores.sub_(largest).exp2_()
        sums_NGXR1 = weights.sum(1).sum(C - 1)[..., None]
        found_NGXRK = self._multiplied(self._placed(weights), values, False).sum(1) / sums_NGXR1
        return found_NGXRK.transpose(1, 2).flatten(0, 1)

    def _placed(self, x: Tensor) -> Tensor:
        """Queries or weights as rows where keys stand at the right of a product, as columns where at its left."""
        return x.mT if self._keys_left else x

    def _multiplied(self, x: Tensor, pool: Tensor, pool_left: bool) -> Tensor:
        """Each matrix of x [N, P, G, X, ...] with that of the pool."""
        rows, columns = (pool, x) if pool_left else (x, pool)
        made = x.new_empty(*x.shape[:4], rows.shape[-2], columns.shape[-1])
        for read, mine, of_mine in zip(self._reads, x, made, strict=True):
            pair = (mine[: read.pages].flatten(0, 2), read.of(pool).flatten(0, 2))
            torch.bmm(*(pair[::-1] if pool_left else pair), out=of_mine[: read.pages].flatten(0, 2))
            of_mine[read.pages :].zero_()
        return made


class _Flash:
    """A read by the CPU's flash kernel, to which pages are a batch and slots are heads."""

    def __init__(self, read: _Read, mask_BRPC: Tensor, first_page: int, key_heads: int):
        self.rows, self._read = read.rows, read
        mask_PXRC = pad(mask_BRPC[read.rows].permute(2, 0, 1, 3), (0, 0, 0, 0, 0, 0, first_page, 0))[: read.pages]
        self._mask_PHRC = mask_PXRC.repeat(1, key_heads, 1, 1) if read.size > 1 else mask_PXRC

    def attend(self, queries_XGRK: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Each page for itself, then all of them, weighed by the sums of their exponentials."""
        X, G, R, K = queries_XGRK.shape
        queries_PHRK = queries_XGRK.transpose(0, 1).reshape(1, G * X, R, K).expand(self._read.pages, -1, -1, -1)
        pages = (self._read.of(pool).flatten(1, 2) for pool in (keys, values))
        found_PHRK, logsumexp_PHR = _flash(queries_PHRK, *pages, attn_mask=self._mask_PHRC)
        found_HRK = (found_PHRK * logsumexp_PHR.softmax(0)[..., None]).sum(0).to(found_PHRK.dtype)
        return found_HRK.unflatten(0, (G, X)).transpose(0, 1)
