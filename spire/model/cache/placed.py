"""The KV cache for a device: paged on a GPU; on a CPU, where memory is taken as it is written, contiguous."""

from __future__ import annotations

import torch

from spire.model.cache.contiguous import ContiguousCache
from spire.model.cache.paged import PagedCache
from spire.model.cache.target_cache import TargetCache
from spire.model.config import ModelConfig


def cache_for(
    config: ModelConfig,
    slots: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parking: int = 0,
    budget: int | None = None,
) -> TargetCache:
    """Return a KV cache (`TargetCache`) of the kind for this device."""
    kind = ContiguousCache if torch.device(device).type == "cpu" else PagedCache
    return kind(config, slots, capacity, dtype, device, parking, budget)
