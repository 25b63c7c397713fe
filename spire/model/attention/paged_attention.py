"""Triton kernels for attention of few new positions to paged keys and values on a GPU.

A sequence is split into stretches, so that a few long sequences also fill a GPU. One program reads a stretch of one
key/value head once, for all queries of the head's group; a second kernel joins the stretches. Sequences are split at
fixed positions, so the order of summation does not depend on the batch.

Shapes: B sequences, G key/value heads, H query heads, T new positions, L positions of a page, K head width, P pages of
a sequence, X pages of all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

PAGE = 64
# Limits of a program's queries per key: a matrix product on the GPU's tensor cores has 16 rows or more.
_LEAST_ROWS, _MOST_ROWS = 16, 128
_WIDTHS = (16, 32, 64, 128, 256)
# Stretches that `_join` reads at once.
_JOINED = 16
_LOG2_E = 1.4426950408889634


class Tuning(NamedTuple):
    """The number of positions per program, and compiler options. The defaults were the fastest tried on an H200."""

    split: int = 1024
    warps: int = 4
    stages: int = 3


FASTEST = Tuning()


# (rows, width) of programs for which this GPU lacks shared memory or registers, as `try_out` found.
_too_large: set[tuple[int, int]] = set()


def attends(queries_per_key: int, new_tokens: int, width: int) -> bool:
    """True if the attention kernels support this number of queries per key and of new tokens, and this head width."""
    queries = queries_per_key * new_tokens
    return queries <= _MOST_ROWS and width in _WIDTHS and (_rows(queries), width) not in _too_large


def _rows(queries: int) -> int:
    return max(_LEAST_ROWS, triton.next_power_of_2(queries))


def try_out(pages_XGLK: Tensor, queries_per_key: int) -> None:
    """Run each kernel that can serve these pages once, so that Triton compiles it now and not during a request.

    A kernel for which the GPU is too small serves no more. Raises RuntimeError for a wrong result, and Triton's errors
    if a kernel cannot be compiled.
    """
    _, G, _, K = pages_XGLK.shape
    keys = torch.ones(1, G, PAGE, K, dtype=pages_XGLK.dtype, device=pages_XGLK.device)
    table_BP = torch.zeros(1, 1, dtype=torch.int32, device=keys.device)
    rows = _LEAST_ROWS
    while attends(queries_per_key, T := max(1, rows // queries_per_key), K):
        queries = torch.ones(1, G * queries_per_key, T, K, dtype=keys.dtype, device=keys.device)
        try:
            if not attend(queries, keys, keys, table_BP, table_BP[0]).eq(1).all():
                raise RuntimeError("attention over ones is not one")
        except triton.runtime.errors.OutOfResources:
            if rows == _LEAST_ROWS:
                raise
            _too_large.add((rows, K))
        rows *= 2


def attend(
    queries_BHTK: Tensor,
    keys_XGLK: Tensor,
    values_XGLK: Tensor,
    table_BP: Tensor,
    lengths_B: Tensor,
    tuning: Tuning = FASTEST,
) -> Tensor:
    """Return the causal attention of T new positions to paged keys and values, [B, H, T, K].

    `table_BP` (int32) names the pages of each sequence, as many as the longest has. `lengths_B` (int32) is each
    sequence's number of earlier positions. The pages must already contain the new keys and values.
    """
    B, H, T, K = queries_BHTK.shape
    splits = triton.cdiv(table_BP.shape[1] * PAGE, tuning.split)
    queries_BHTK = queries_BHTK.contiguous()
    found_BTHK = queries_BHTK.new_empty(B, T, H, K)
    parts = queries_BHTK.new_empty(B, H * T, splits, K, dtype=torch.float32)
    weights = queries_BHTK.new_empty(B, H * T, splits, dtype=torch.float32)
    _launch_stretch(queries_BHTK, keys_XGLK, values_XGLK, table_BP, lengths_B, parts, weights, *tuning)
    _launch_join(parts, weights, lengths_B, found_BTHK, tuning.split)
    return found_BTHK.transpose(1, 2)


@custom_op("spire::stretch", mutates_args=("parts", "weights"))
def _launch_stretch(
    queries_BHTK: Tensor, keys_XGLK: Tensor, values_XGLK: Tensor, table_BP: Tensor, lengths_B: Tensor,
    parts: Tensor, weights: Tensor, split: int, warps: int, stages: int,
) -> None:  # fmt: skip
    B, H, T, K = queries_BHTK.shape
    G, splits = keys_XGLK.shape[1], parts.shape[2]
    shape = (T, H // G, G, table_BP.shape[1], splits)
    _stretch[(B, G, splits)](
        queries_BHTK, keys_XGLK, values_XGLK, table_BP, lengths_B, parts, weights, K**-0.5 * _LOG2_E, *shape,
        ROWS=_rows(H // G * T), K=K, PAGE=PAGE, SPLIT=split, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@custom_op("spire::join", mutates_args=("found_BTHK",))
def _launch_join(parts: Tensor, weights: Tensor, lengths_B: Tensor, found_BTHK: Tensor, split: int) -> None:
    B, T, H, K = found_BTHK.shape
    _join[(B, H * T)](
        parts, weights, lengths_B, found_BTHK, T, H * T, parts.shape[2], K=K, SPLIT=split, JOINED=_JOINED, num_warps=2
    )


@triton.jit(do_not_specialize=["T", "GROUP", "G", "pages", "splits"])
def _stretch(
    queries, keys, values, table, lengths, parts, weights, scale, T, GROUP, G, pages, splits,
    ROWS: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin = split * SPLIT
    # Padding after a full sequence has no page.
    end = tl.minimum(tl.minimum(begin + SPLIT, length + T), pages * PAGE)
    if begin < end:
        row, k, at = tl.arange(0, ROWS), tl.arange(0, K), tl.arange(0, PAGE)
        used = row < GROUP * T
        # The queries of a group are contiguous: head by head, with T positions each.
        first = (sequence * G + head).to(tl.int64) * GROUP * T
        q = tl.load(queries + (first + row)[:, None] * K + k[None, :], mask=used[:, None], other=0.0)
        last = length + row % T
        greatest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, K], tl.float32)
        # A constant number of steps, so that the next pages are loaded while one is multiplied.
        for step in range(SPLIT // PAGE):
            now = begin + step * PAGE
            page = tl.load(table + sequence * pages + now // PAGE, mask=now < end, other=0).to(tl.int64)
            place = ((page * G + head) * PAGE + at) * K
            there = now + at < end
            key = tl.load(keys + place[None, :] + k[:, None], mask=there[None, :], other=0.0)
            scores = tl.dot(q, key, input_precision="ieee") * scale
            seen = there[None, :] & ((now + at)[None, :] <= last[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(greatest, tl.max(scores, 1))
            # A query that has seen no key yet subtracts 0, because -inf - -inf is NaN.
            base = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(scores - base[:, None])
            kept = tl.exp2(greatest - base)
            total = total * kept + tl.sum(p, 1)
            value = tl.load(values + place[:, None] + k[None, :], mask=there[:, None], other=0.0)
            found = found * kept[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
            greatest = new
        weight = tl.where(total > 0, greatest + tl.log2(total), float("-inf"))
        found = found / tl.where(total > 0, total, 1.0)[:, None]
        to = (first + row) * splits + split
        tl.store(weights + to, weight, mask=used)
        tl.store(parts + to[:, None] * K + k[None, :], found, mask=used[:, None])


@triton.jit(do_not_specialize=["T", "rows", "splits"])
def _join(parts, weights, lengths, found, T, rows, splits, K: tl.constexpr, SPLIT: tl.constexpr, JOINED: tl.constexpr):
    sequence, row = tl.program_id(0), tl.program_id(1)
    count = tl.minimum(tl.cdiv(tl.load(lengths + sequence) + T, SPLIT), splits)
    of_row = sequence.to(tl.int64) * rows + row
    split, k = tl.arange(0, JOINED), tl.arange(0, K)
    greatest, total, sum_K = float("-inf"), 0.0, tl.zeros([K], tl.float32)
    first = 0
    while first < count:
        used = first + split < count
        at = of_row * splits + first + split
        weight = tl.load(weights + at, mask=used, other=float("-inf"))
        # Every query sees the first stretch, so the maximum is finite.
        new = tl.maximum(greatest, tl.max(weight, 0))
        share = tl.exp2(weight - new)
        kept = tl.exp2(greatest - new)
        part = tl.load(parts + at[:, None] * K + k[None, :], mask=used[:, None], other=0.0)
        sum_K = sum_K * kept + tl.sum(part * share[:, None], 0)
        total = total * kept + tl.sum(share, 0)
        greatest = new
        first += JOINED
    # From head by head to position by position, as the output projection takes them.
    to = (sequence.to(tl.int64) * rows + row % T * (rows // T) + row // T) * K
    tl.store(found + to + k, (sum_K / total).to(found.dtype.element_ty))
