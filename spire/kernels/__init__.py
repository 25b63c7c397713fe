"""C kernels for x86 processors: bfloat16 with AMX or AVX512-BF16, float32 with AVX-512 or AVX2.

The kernels are built at installation if a C compiler is found. Without a kernel for the processor, torch computes.
Every kernel sums the terms of a row or query in the same order, whatever else is in the batch.
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
except ImportError:  # installed without a C compiler
    _compiled = None

COMPILED = _compiled is not None
# Kernel of `spire.decoding.randomness`, for any processor; None if not compiled.
uniforms: Callable[..., None] | None = _compiled and _compiled.uniforms
# The sampling kernels need a vocabulary size that is a multiple of this, as in `sampling.h`.
SHARES = 32
# Fewer elements are copied by one thread, which finishes before another thread has started.
_SHARED = 2**19


@dataclass(frozen=True)
class Kernels:
    """The C kernels of one instruction set, for one dtype. `compiled.pyi` documents their arguments.

    Tensors are passed by address. `block`: the number of a weight's outputs stored together. `head_multiple`: attention
    needs a head_dim that is a multiple of this. `most_queries`: most queries per key in attention, None for no limit.
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
            of_all(self.index, *(x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x for x in arguments))

        object.__setattr__(self, name, of_these)
        return of_these

    def attends(self, head_dim: int) -> bool:
        """True if the attention kernels support heads of width `head_dim`."""
        return head_dim % self.head_multiple == 0 and head_dim <= int(_compiled.MOST_WIDTH)


@cache
def every_kernels() -> tuple[Kernels, ...]:
    """Return the C kernels for each instruction set of this processor, fastest first. Call this before any kernel."""
    found = _compiled.available() if COMPILED else []
    return tuple(
        Kernels(index, name, torch.bfloat16 if narrow else torch.float32, block, multiple, most or None)
        for index, name, narrow, block, multiple, most in found
    )


@cache
def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """Return the fastest C kernels for `dtype` on this processor, or None if there are none."""
    return next((kernels for kernels in every_kernels() if kernels.dtype == dtype), None)


def collects(x_KV: Tensor) -> bool:
    """True if `collect` supports tensors of this dtype and layout on this processor."""
    fits = x_KV.dtype == torch.bfloat16 and x_KV.is_contiguous() and x_KV.shape[-1] % 16 == 0
    return fits and bool(every_kernels())


def collect(rows_KV: Sequence[Tensor | None], K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stack B bfloat16 tensors of up to K rows to [B, K, V]; also return each row's sum and minimum, float32 [B, K].

    One pass over the draft's q computes all that is needed to check q. Missing rows are zero.
    """
    B, places = len(rows_KV), [(0, 0) if rows is None else (rows.data_ptr(), len(rows)) for rows in rows_KV]
    addresses_B, counts_B = torch.from_numpy(np.array([*zip(*places, strict=True)]))
    together_BKV, (sums_BK, leasts_BK) = torch.empty(B, K, V, dtype=torch.bfloat16), torch.empty(2, B, K)
    threads = torch.get_num_threads() if together_BKV.numel() >= _SHARED else 1
    every_kernels()[0].collect(addresses_B, counts_B, together_BKV, sums_BK, leasts_BK, B, K, V, threads)
    return together_BKV, sums_BK, leasts_BK
