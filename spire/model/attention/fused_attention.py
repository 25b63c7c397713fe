"""Attention to contiguous slots by this project's CPU kernels: `spire/kernels/vectors.h` and `tiles.c`.

The result of a query does not depend on other queries: neither on the batch nor on the number of verified tokens.

Shapes: N layers, B sequences, T new positions, H query heads, G key/value heads, K head width, L positions of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spire.kernels import Kernels


class FusedPools:
    """The addresses of N layers' key and value tensors, each [slots, G, L, K], which must outlive this object."""

    def __init__(self, kernels: Kernels, keys: Sequence[Tensor], values: Sequence[Tensor]):
        self.kernels = kernels
        _, self.heads, self.columns, self.width = keys[0].shape
        self.strides = keys[0].stride()[:2]
        addresses = [(pool.data_ptr(), other.data_ptr()) for pool, other in zip(keys, values, strict=True)]
        self.addresses_N2 = torch.tensor(addresses, dtype=torch.int64)


class FusedAttention:
    """Causal attention, by CPU kernels, of T new positions per slot to the slot's committed and new positions."""

    def __init__(self, pools: FusedPools, slots: Sequence[int], lengths: Sequence[int], new_tokens: int):
        self.pools, self.new_tokens, self.end = pools, new_tokens, max(lengths) + new_tokens
        self._slots_B, self._lengths_B = torch.tensor(slots), torch.tensor(lengths)

    @property
    def rows(self) -> int:
        return len(self._slots_B) * self.new_tokens

    @property
    def stretch(self) -> tuple[int, ...]:
        """The tuple (B, T, address of slots, address of lengths) for kernels, valid while this object lives."""
        return len(self._slots_B), self.new_tokens, self._slots_B.data_ptr(), self._lengths_B.data_ptr()

    def attend(self, layer: int, queries_BHTK: Tensor, new_keys_BGTK: Tensor, new_values_BGTK: Tensor) -> Tensor:
        """Store one layer's new keys and values in the pools, and return its attention output [B, H, T, K]."""
        B, H, T, K = queries_BHTK.shape
        found_BTHK = torch.empty(B, T, H, K, dtype=queries_BHTK.dtype)
        given = (queries_BHTK, new_keys_BGTK, new_values_BGTK)
        new = [x if x.stride(-1) == 1 else x.contiguous() for x in given]  # the kernel takes contiguous rows [K]
        pools = self.pools
        places = (*pools.addresses_N2[layer].tolist(), found_BTHK, self._slots_B, self._lengths_B)
        strided = [part for x in new for part in (x, *x.stride()[:3])]
        shape = (B, T, H, pools.heads, K, pools.columns, *pools.strides)
        pools.kernels.attend(*strided, *places, *shape, torch.get_num_threads())
        return found_BTHK.transpose(1, 2)
