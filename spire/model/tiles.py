"""The matrix tiles of x86 processors (AMX) and what they compute here: `_tiles.c`.

Built at installation where there is a C compiler. Without it, or on another processor, torch's kernels serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    from spire.model import _tiles

    kernels: Any = _tiles
except ImportError:  # it was installed where there is no compiler
    kernels = None

COMPILED = kernels is not None
# Numbers that one thread is done with before another has woken.
_SHARED = 2**19


@cache
def available() -> bool:
    """Whether this process can use them. To ask is what lets it."""
    return COMPILED and bool(kernels.available())


def widens(x_KV: Tensor) -> bool:
    """Whether `widen` takes rows such as these."""
    return x_KV.dtype == torch.bfloat16 and x_KV.is_contiguous() and x_KV.shape[-1] % 16 == 0 and available()


def widen(rows_KV: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """B tensors in bfloat16 as one in float32 [B, K, V], and each row's sum and least number [B, K].

    That is all that is asked of most of q, in one pass over it.
    """
    (K, V), B = rows_KV[0].shape, len(rows_KV)
    addresses_B = torch.tensor([rows.data_ptr() for rows in rows_KV], dtype=torch.int64)
    wide_BKV, (sums_BK, leasts_BK) = torch.empty(B, K, V), torch.empty(2, B, K)
    addresses = (x.data_ptr() for x in (addresses_B, wide_BKV, sums_BK, leasts_BK))
    threads = torch.get_num_threads() if wide_BKV.numel() >= _SHARED else 1
    kernels.widen(*addresses, B, K, V, threads)
    return wide_BKV, sums_BK, leasts_BK
