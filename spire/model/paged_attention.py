"""Attention over pages of several slots each, by products: float32 on a CPU.

Keys are [K, C] in memory: few queries are multiplied with such keys half again as fast. What neighbouring slots hold up
to any page is contiguous, so it takes one matrix product, and nothing is gathered or copied; what one of them holds is
evenly spread, and multiplied where it lies, too. Each key and value byte is read once.

Shapes: N groups of X slots, P pages of C positions, G key/value heads, K head width, B sequences, S columns of a mask,
R queries of each key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


class PagedAttention:
    """What new positions of some slots find in the first `needed` positions of theirs.

    Rows come and go in `order`: those of whole groups first.
    """

    def __init__(self, slots: Sequence[int], needed: Sequence[int], pool: Tensor):
        """`pool`: any layer's keys, [N, P, G, X, C, K]."""
        group, self._page = pool.shape[3:5]
        pages = [-(-positions // self._page) for positions in needed]
        self._reads, self.order = _plan(slots, pages, group)
        self.columns = max(pages) * self._page

    def see(self, mask_BRS: Tensor) -> None:
        """Add this to scores of the last S columns; all see those before."""
        first_page, hidden = divmod(self.columns - mask_BRS.shape[2], self._page)
        mask_BRPC = pad(mask_BRS, (hidden, 0)).unflatten(2, (-1, self._page))
        sizes = sorted({read.size for read in self._reads}, reverse=True)
        self._stacks = [_Stack([r for r in self._reads if r.size == size], mask_BRPC, first_page) for size in sizes]

    def attend(self, queries_BGRK: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """What was found in these pools, as parts of [B, G, R, K]."""
        return [stack.attend(queries_BGRK[stack.rows], keys, values) for stack in self._stacks]


@dataclass(frozen=True)
class _Read:
    """The first pages of `size` slots of a group from `first` on, which stand in these rows."""

    group: int
    first: int
    size: int
    pages: int
    rows: slice

    def of(self, pool: Tensor) -> Tensor:
        """[P * G * X, C, K]."""
        return pool[self.group, : self.pages, :, self.first : self.first + self.size].flatten(0, 2)


def _plan(slots: Sequence[int], pages: Sequence[int], group: int) -> tuple[list[_Read], list[int]]:
    """Whole groups, then single slots; and the batch's rows in their order."""
    members: dict[int, list[int]] = {}
    for row in sorted(range(len(slots)), key=slots.__getitem__):
        members.setdefault(slots[row] // group, []).append(row)
    whole = [rows for rows in members.values() if len(rows) == group]
    single = [[row] for rows in members.values() if len(rows) < group for row in rows]
    reads: list[_Read] = []
    order: list[int] = []
    for rows in whole + single:
        at = slice(len(order), len(order) + len(rows))
        reads.append(_Read(*divmod(slots[rows[0]], group), len(rows), max(pages[row] for row in rows), at))
        order += rows
    return reads, order


class _Stack:
    """Reads of as many slots each, by a product each; their scores are one tensor [N, P, G, X, R, C].

    Pages that a read has not hold zeros, and are masked.
    """

    def __init__(self, reads: Sequence[_Read], mask_BRPC: Tensor, first_page: int):
        self.rows = slice(reads[0].rows.start, reads[-1].rows.stop)
        self._reads, self._size = reads, reads[0].size
        self._pages = max(read.pages for read in reads)
        mask_NXRPC = mask_BRPC[self.rows, :, : self._pages - first_page].unflatten(0, (-1, self._size))
        self._first_page, self._mask = first_page, mask_NXRPC.permute(0, 3, 1, 2, 4)[:, :, None].contiguous()

    def attend(self, queries_BGRK: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Scores become weights where the first products left them, and the second take them from there."""
        # exp2 is as fast for what is masked; exp is not.
        queries_BGRK = queries_BGRK * (queries_BGRK.shape[-1] ** -0.5 * math.log2(math.e))
        queries_NGXRK = queries_BGRK.unflatten(0, (-1, self._size)).transpose(1, 2)
        scores = self._multiplied(queries_NGXRK[:, None].expand(-1, self._pages, -1, -1, -1, -1), keys.mT)
        scores[:, self._first_page :].add_(self._mask)
        weights = scores.sub_(scores.amax((1, 5), keepdim=True)).exp2_()
        found_NGXRK = self._multiplied(weights, values).sum(1) / weights.sum((1, 5))[..., None]
        return found_NGXRK.transpose(1, 2).flatten(0, 1)

    def _multiplied(self, x: Tensor, pool: Tensor) -> Tensor:
        """Each matrix of x [N, P, G, X, ...] with that of the pool."""
        made = x.new_empty(*x.shape[:5], pool.shape[-1])
        for read, mine, of_mine in zip(self._reads, x, made, strict=True):
            torch.bmm(mine[: read.pages].flatten(0, 2), read.of(pool), out=of_mine[: read.pages].flatten(0, 2))
            of_mine[read.pages :].zero_()
        return made
