"""Replace a model's layers by kernels for serving on a CPU. A packed model cannot be trained or saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from torch import Tensor, nn

from spire.model.backends.fused_layer import FusedLayer, FusedNorm, FusedProduct, kernels_of
from spire.model.backends.fused_target import FusedStack
from spire.model.draft import Draft
from spire.model.layers import Layer
from spire.model.target import Target

Model = TypeVar("Model", Target, Draft)


def pack(model: Model) -> Model:
    """Replace in place the parts of a model that CPU kernels support; torch computes the rest. For inference only."""
    if kernels := kernels_of(model.config, next(model.parameters())):
        model.layers = nn.ModuleList(FusedLayer(layer, kernels) for layer in cast(Iterable[Layer], model.layers))
        replace_head(model, FusedProduct(model.lm_head, kernels))
        if isinstance(model, Target):
            model.norm = FusedNorm(cast(nn.RMSNorm, model.norm), kernels)
            model.stack = FusedStack(model, kernels)
    return model


def replace_head(model: Target | Draft, head: Callable[[Tensor], Tensor]) -> None:
    """Replace the model's unembedding by `head` and drop the weight of `lm_head`; a tied embedding keeps its weight."""
    model.fused_head = head
    model.lm_head.weight = None  # type: ignore[assignment]
