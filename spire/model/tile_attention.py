"""Attention over slots that are contiguous each, by matrix tiles: `_tile_attention.c`.

A query's sums do not depend on how many others there are: not on the batch, nor on how many tokens are verified.

Shapes: B sequences, T new positions, R queries of each key, G key/value heads, K head width, L positions of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spire.model.config import ModelConfig
from spire.model.tiles import COMPILED, available, kernels

# With more queries of each key than this the flash kernel is faster.
MOST_QUERIES = kernels.MOST_QUERIES if COMPILED else 0


def has_tiles(config: ModelConfig) -> bool:
    """Whether tiles can attend for such a model here."""
    return available() and config.head_dim % 64 == 0 and config.head_dim <= kernels.MOST_WIDTH


class TileAttention:
    """What T new positions of some slots find in what is committed there and in one another."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], new_tokens: int):
        self.order = list(range(len(slots)))
        self._slots_B = torch.tensor(slots)
        self._lengths_B = torch.tensor(lengths)
        self._new_tokens = new_tokens

    def attend(self, queries_BGRK: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """What was found in these pools, [slots, 1, G, 1, L, K], as the one part of [B, G, R, K]."""
        queries = queries_BGRK.contiguous()
        found = torch.empty_like(queries)
        B, G, R, K = queries.shape
        addresses = (x.data_ptr() for x in (queries, keys, values, found, self._slots_B, self._lengths_B))
        shape = (B, G, R, self._new_tokens, K, keys.shape[4])
        kernels.attend(*addresses, *shape, keys.stride(0), keys.stride(2), torch.get_num_threads())
        return [found]
