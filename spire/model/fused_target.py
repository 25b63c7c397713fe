"""A target's layers by one kernel, `spire/kernels/target.h`: all of a forward but embeddings,
the last norm and logits.

Layer by layer a forward of few rows is mostly dispatch, and each of its operations may find the interpreter with
another thread of its process.

Shapes: B sequences, T positions, R = B * T rows, N layers, D width, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spire.kernels import Kernels
from spire.model.config import ModelConfig
from spire.model.fused_attention import FusedAttention
from spire.model.fused_layer import FusedLayer, Rotations
from spire.model.layers import Rope


class FusedStack:
    """The layers of a packed target, which must outlive it."""

    def __init__(self, config: ModelConfig, layers: Sequence[FusedLayer], rope: Rope, kernels: Kernels):
        self._config, self._kernels, self._rotations = config, kernels, Rotations(rope, kernels.dtype)
        self._eps = layers[0].eps
        self._weights = torch.tensor([layer.addresses for layer in layers], dtype=torch.int64)

    def __call__(
        self,
        embedded_BTD: Tensor,
        positions_BT: Tensor,
        attentions: Sequence[FusedAttention],
        tapped_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """What leaves the last layer, [B, T, D], and activations [B, T, taps, D] that enter the tapped layers.

        Rows are those of `attentions`, one after the other. The embeddings are used up.
        """
        config, pools = self._config, attentions[0].pools
        B, T, D = embedded_BTD.shape
        H, G, K, F = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size
        R = B * T
        firsts = accumulate((attention.rows for attention in attentions), initial=0)
        stretches = torch.tensor([(first, *it.stretch) for first, it in zip(firsts, attentions, strict=False)])
        rope = self._rotations.at(positions_BT.flatten(), max(attention.end for attention in attentions))
        layers, tapped = torch.cat((self._weights, pools.addresses_N2), dim=1), torch.tensor(tapped_layers)
        x_BTD = embedded_BTD.contiguous()
        scratch = torch.empty(R * (2 * D + K * (2 * H + 2 * G) + F), dtype=self._kernels.dtype)
        taps_BTND = torch.empty(B, T, len(tapped_layers), D, dtype=self._kernels.dtype)
        tensors = (layers, stretches, tapped, *rope, x_BTD, scratch, taps_BTND)
        shape = (len(attentions), len(tapped_layers), R, len(layers), D, H, G, K, F, pools.columns)
        addresses = (tensor.data_ptr() for tensor in tensors)
        self._kernels.forward(*addresses, self._eps, *shape, *pools.strides, torch.get_num_threads())
        return x_BTD, taps_BTND if tapped_layers else None
