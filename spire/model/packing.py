"""A model's weights as this processor multiplies them fastest, for serving: what was packed is not trained or saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

import torch
from torch import nn

from spire.model.draft import Draft
from spire.model.layers import Layer
from spire.model.linears import Linears
from spire.model.target import Target
from spire.model.tile_layer import TileLayer, TileProduct, by_tiles

Model = TypeVar("Model", Target, Draft)


def pack(model: Model) -> Model:
    """Pack all there is on a CPU, of bfloat16 where it multiplies that, and leave the rest; in inference mode only."""
    weight = next(model.parameters())
    packs = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if by_tiles(model.config, weight):
        model.layers = nn.ModuleList(TileLayer(layer) for layer in cast(Iterable[Layer], model.layers))
        model.pack(TileProduct)
    elif weight.device.type == "cpu" and packs:
        for module in model.modules():
            if isinstance(module, Linears):
                module.pack()
    return model
