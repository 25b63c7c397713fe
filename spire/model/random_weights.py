"""Weights that are drawn where they are needed: a checkpoint directory of a shape alone, for measurements of time.

Its `config.json` says `spire_random_weights`, and there are no tensors. A GPU draws 16 GB of bfloat16 in a moment;
written, read and copied there they take a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from spire.model.config import read_config

RANDOM_WEIGHTS = "spire_random_weights"
_DEVIATION = 0.02

Model = TypeVar("Model", bound=nn.Module)


def has_random_weights(directory: Path) -> bool:
    """True where the model in `directory` is a shape alone. Weights that are there come first."""
    return bool(read_config(directory).get(RANDOM_WEIGHTS)) and not any(directory.glob("*.safetensors*"))


def draw_weights(build: Callable[[], Model], dtype: torch.dtype, device: torch.device | str) -> Model:
    """A model with weights as before any training, always the same. Its memory is taken once, where it is to be."""
    with torch.device("meta"):
        model = build()
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, _DEVIATION, generator=generator)
        else:
            parameter.fill_(1)
    return model
