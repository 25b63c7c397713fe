"""Attention over slots that are contiguous each, by kernels of ours: `spire/kernels/vectors.h` and `tiles.c`.

A query's sums do not depend on how many others there are: not on the batch, nor on how many tokens are verified.

Shapes: B sequences, T new positions, H query heads, G key/value heads, K head width, L positions of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spire.kernels import Kernels


class FusedAttention:
    """What T new positions of some slots find in what is committed there and in one another."""

    def __init__(self, kernels: Kernels, slots: Sequence[int], lengths: Sequence[int]):
        self._kernels = kernels
        self._slots_B = torch.tensor(slots)
        self._lengths_B = torch.tensor(lengths)

    def attend(
        self, queries_BHTK: Tensor, new_keys_BGTK: Tensor, new_values_BGTK: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Store new keys and values in their pools, [slots, G, L, K]; what queries find there, [B, H, T, K]."""
        B, H, T, K = queries_BHTK.shape
        found_BTHK = torch.empty(B, T, H, K, dtype=keys.dtype)
        new = [_rows(x) for x in (queries_BHTK, new_keys_BGTK, new_values_BGTK)]
        addresses = (x.data_ptr() for x in (keys, values, found_BTHK, self._slots_B, self._lengths_B))
        shape = (B, T, H, keys.shape[1], K, keys.shape[2])
        strides = [part for x in new for part in (x.data_ptr(), *x.stride()[:3])]
        self._kernels.attend(*strides, *addresses, *shape, keys.stride(0), keys.stride(1), torch.get_num_threads())
        return found_BTHK.transpose(1, 2)


def _rows(x_BHTK: Tensor) -> Tensor:
    """The same with contiguous rows [K]."""
    return x_BHTK if x_BHTK.stride(-1) == 1 else x_BHTK.contiguous()
