"""Random weights for a checkpoint directory without tensors, to measure speed.

The `config.json` of a directory without tensors sets `spire_random_weights`. Drawing weights on the device is much
faster than writing, reading and copying them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from spire.model.config import read_config

RANDOM_WEIGHTS = "spire_random_weights"

Model = TypeVar("Model", bound=nn.Module)


def has_random_weights(directory: Path) -> bool:
    """True if the config asks for random weights and the directory has no safetensors, which take precedence."""
    return bool(read_config(directory).get(RANDOM_WEIGHTS)) and not any(directory.glob("*.safetensors*"))


def draw_weights(build: Callable[[], Model], dtype: torch.dtype, device: torch.device | str) -> Model:
    """Build a model with random weights, the same at every call, allocated directly on `device`."""
    with torch.device("meta"):
        model = build()
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.02, generator=generator)
        else:
            parameter.fill_(1)
    return model
