"""Kernels of ours for x86 processors: bfloat16 by matrix tiles (AMX) or pairs (AVX512-BF16), float32 by vectors
(AVX-512, AVX2).

Built at installation where there is a C compiler. Without it, or on another processor, torch's kernels serve. All of
them compute a number of a row or a query by the same sum in the same order whoever else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from spire.kernels import compiled

    _compiled: Any = compiled
except ImportError:  # it was installed where there is no compiler
    _compiled = None

COMPILED = _compiled is not None
# What `spire.randomness` has a kernel for, on any processor; None without one.
uniforms: Callable[..., None] | None = _compiled and _compiled.uniforms
# Vocabularies that kernels draw from are a multiple of this, which `sampling.h` has too.
SHARES = 32
# Numbers that one thread is done with before another has woken.
_SHARED = 2**19


@dataclass(frozen=True)
class Kernels:
    """Those for one type of numbers. What they are called with is in `compiled.pyi`.

    `block`: outputs of a weight that lie together. Heads that they attend for are as wide as a multiple of
    `head_multiple`. `most_queries` of each key, or None for any.
    """

    index: int
    name: str
    dtype: torch.dtype
    block: int
    head_multiple: int
    most_queries: int | None

    def __getattr__(self, name: str) -> Callable[..., None]:
        of_all = getattr(_compiled, name)

        def of_these(*arguments: object) -> None:
            of_all(self.index, *arguments)

        object.__setattr__(self, name, of_these)
        return of_these

    def attends(self, head_dim: int) -> bool:
        """Whether they can for heads of this width."""
        return head_dim % self.head_multiple == 0 and head_dim <= int(_compiled.MOST_WIDTH)


@cache
def every_kernels() -> tuple[Kernels, ...]:
    """All that this processor can run, the fastest first. To ask is what lets it."""
    found = _compiled.available() if COMPILED else []
    return tuple(
        Kernels(index, name, torch.bfloat16 if narrow else torch.float32, block, multiple, most or None)
        for index, name, narrow, block, multiple, most in found
    )


@cache
def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """The fastest for a model whose numbers are of this type on this processor, if there are any."""
    return next((kernels for kernels in every_kernels() if kernels.dtype == dtype), None)


def collects(x_KV: Tensor) -> bool:
    """Whether `collect` takes rows such as these."""
    fits = x_KV.dtype == torch.bfloat16 and x_KV.is_contiguous() and x_KV.shape[-1] % 16 == 0
    return fits and bool(every_kernels())


def collect(rows_KV: Sequence[Tensor | None], K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """B tensors in bfloat16 of up to K rows as one [B, K, V], and in float32 each row's sum and least number [B, K].

    That is all that is asked of most of q, in one pass over it. What is not there is zero.
    """
    return _collected([(0, 0) if rows is None else (rows.data_ptr(), len(rows)) for rows in rows_KV], K, V)


def collect_from(x_XKV: Tensor, rows: Sequence[int | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The same of some rows of one tensor."""
    _, K, V = x_XKV.shape
    first, step = x_XKV.data_ptr(), K * V * x_XKV.element_size()
    return _collected([(0, 0) if row is None else (first + row * step, K) for row in rows], K, V)


def _collected(places: Sequence[tuple[int, int]], K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Addresses, and how many of K there are at each."""
    B = len(places)
    addresses_B, counts_B = torch.from_numpy(np.array([*zip(*places, strict=True)]))
    together_BKV, (sums_BK, leasts_BK) = torch.empty(B, K, V, dtype=torch.bfloat16), torch.empty(2, B, K)
    addresses = (x.data_ptr() for x in (addresses_B, counts_B, together_BKV, sums_BK, leasts_BK))
    threads = torch.get_num_threads() if together_BKV.numel() >= _SHARED else 1
    every_kernels()[0].collect(*addresses, B, K, V, threads)
    return together_BKV, sums_BK, leasts_BK
