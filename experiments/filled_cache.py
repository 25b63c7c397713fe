"""A cache of sequences as after long prompts, to time steps behind them."""

from __future__ import annotations

import torch

from spire.model.cache.placed import cache_for
from spire.model.cache.target_cache import TargetCache
from spire.model.config import ModelConfig


def filled_cache(
    config: ModelConfig, batch: int, context: int, room: int, dtype: torch.dtype, device: torch.device
) -> tuple[TargetCache, list[int]]:
    """Return a cache of `batch` sequences with `context` random positions and room for `room` more, and their slots."""
    cache = cache_for(config, batch, context + room, dtype, device)
    slots = [cache.allocate() for _ in range(batch)]
    assert cache.reserve(slots, context)
    cache.commit(slots, [context] * batch)
    for keys_RK, values_RK in cache.pools:  # untouched zeros would all be one page of memory
        keys_RK.normal_()
        values_RK.normal_()
    return cache, slots
