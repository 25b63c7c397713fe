"""Attention over slots that are contiguous each, by the matrix tiles of x86 processors (AMX): `_tiles.c`.

Built at installation where there is a C compiler; without it, or on another processor, torch's flash kernel serves.
A query's sums do not depend on how many others there are: not on the batch, nor on how many tokens are verified.

Shapes: B sequences, T new positions, R queries of each key, G key/value heads, K head width, L positions of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spire.model.config import ModelConfig

try:
    from spire.model import _tiles
except ImportError:  # it was installed where there is no compiler
    _tiles = None  # type: ignore[assignment]

COMPILED = _tiles is not None
# With more queries of each key than this the flash kernel is faster.
MOST_QUERIES = _tiles.MOST_QUERIES if COMPILED else 0


def has_tiles(config: ModelConfig) -> bool:
    """Whether tiles can attend for such a model here."""
    if _tiles is None or not _tiles.available():
        return False
    return config.head_dim % 64 == 0 and config.head_dim <= _tiles.MOST_WIDTH


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
        _tiles.attend(*addresses, *shape, keys.stride(0), keys.stride(2), torch.get_num_threads())
        return [found]
