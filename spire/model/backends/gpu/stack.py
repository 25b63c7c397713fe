"""The layers of a target on a GPU: four matrix products, attention and four kernels between them for each layer.

Shapes: B sequences, T positions, R = B * T rows, N tapped layers, D width, E outputs, H query heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import cast

from torch import Tensor

from spire.model.backends.gpu.packed_layer import PackedLayer
from spire.model.cache.paged import PagedView
from spire.model.target import Target, TargetOutput


class GpuStack:
    """All layers of a target that has packed layers, by Triton kernels (`elementwise`). The target must outlive it."""

    def __init__(self, target: Target, elementwise: ModuleType):
        self._target, self._kernels = target, elementwise
        self._layers = cast(Sequence[PackedLayer], target.layers)

    def __call__(self, tokens_BT: Tensor, cache: PagedView, tapped_layers: Sequence[int]) -> TargetOutput:
        """Run the target as `Target.forward` does, with at most 12 launches for each layer."""
        target, kernels = self._target, self._kernels
        B, T = tokens_BT.shape
        hidden_RD = target.embed_tokens(tokens_BT).flatten(0, 1)
        R, D = hidden_RD.shape
        cosine, signed_sine = (
            part.expand(B, 1, T, -1).reshape(R, -1) for part in target.rope(cache.positions_BT, hidden_RD.dtype)
        )
        taps_BTND = hidden_RD.new_empty(B, T, len(tapped_layers), D) if tapped_layers else None
        more_RD: Tensor | None = None
        for index, layer in enumerate(self._layers):
            weight_D = layer.input_layernorm.weight
            if more_RD is None:
                normed_RD = kernels.norm(hidden_RD, weight_D, layer.eps)
            else:
                hidden_RD, normed_RD = kernels.add_norm(hidden_RD, more_RD, weight_D, layer.eps)
            if taps_BTND is not None and index in tapped_layers:
                taps_BTND[:, :, tapped_layers.index(index)] = hidden_RD.view(B, T, D)
            projected_RE = layer.queries_keys_values_proj(normed_RD)
            queries_BHTK = kernels.rotate_and_store(
                projected_RE, cosine, signed_sine, cache.rows_RG, *cache.cache.pools[index], layer.heads, T
            )
            attended_BHTK = cache.attend_stored(index, queries_BHTK)
            attended_RE = attended_BHTK.transpose(1, 2).reshape(R, -1)
            hidden_RD, normed_RD = kernels.add_norm(
                hidden_RD, layer.o_proj(attended_RE), layer.post_attention_layernorm.weight, layer.eps
            )
            more_RD = layer.down_proj(kernels.silu_mul(layer.gate_up_proj(normed_RD)))
        assert more_RD is not None
        _, out_RD = kernels.add_norm(hidden_RD, more_RD, target.norm.weight, self._layers[0].eps)
        return TargetOutput(out_RD.view(B, T, D), taps_BTND)
