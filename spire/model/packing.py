"""A model's weights as this processor multiplies them fastest, for serving: what was packed is not trained or saved."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeVar, cast

import torch
from torch import nn

from spire.model.draft import Draft
from spire.model.fused_layer import FusedLayer, FusedNorm, FusedProduct, kernels_of
from spire.model.fused_target import FusedStack
from spire.model.layers import Layer
from spire.model.linears import Linears
from spire.model.target import Target

Model = TypeVar("Model", Target, Draft)


def pack(model: Model) -> Model:
    """Pack all there is on a CPU, of bfloat16 where it multiplies that, and leave the rest; in inference mode only."""
    weight = next(model.parameters())
    packs = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if kernels := kernels_of(model.config, weight):
        model.layers = nn.ModuleList(FusedLayer(layer, kernels) for layer in cast(Iterable[Layer], model.layers))
        model.pack(partial(FusedProduct, kernels=kernels))
        if isinstance(model, Target):
            model.norm = FusedNorm(cast(nn.RMSNorm, model.norm), kernels)
            model.stack = FusedStack(model, kernels)
    elif weight.device.type == "cpu" and packs:
        for module in model.modules():
            if isinstance(module, Linears):
                module.pack()
    return model
