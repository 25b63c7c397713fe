"""A SPIRe draft's round on a GPU: 12 launches for each layer and pass, 14 with weights in fp8.

Shapes: B sequences, N layers, L = N + 1 residual streams, D width, G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from spire.model.backends.gpu.fp8 import Fp8Linear, Rows8
from spire.model.backends.gpu.packed_layer import PackedLayer
from spire.model.draft_memory import DraftMemory


class DraftKernels(NamedTuple):
    """The modules `elementwise` and `draft_attention`."""

    elementwise: ModuleType
    attention: ModuleType


class GpuRound:
    """A round of k passes over slots of a draft with packed layers. Implements DraftingRound."""

    def __init__(self, memory: DraftMemory, slots_B: Tensor, base_B: Tensor, k: int, kernels: DraftKernels):
        config = memory.draft.config
        N, B, G, K = config.num_hidden_layers, len(slots_B), config.num_key_value_heads, config.head_dim
        self._memory, self._kernels = memory, kernels
        self._slots_B, self._base_B, self._k, self._passes = slots_B, base_B, k, -1
        # Keys and values of the round's own positions.
        self._own = memory.keys_NXGSK.new_zeros(2, N, B, G, k, K)
        self._first_rows_BG = (torch.arange(B * G, device=slots_B.device) * k).view(B, G)
        self._layers = cast(Sequence[PackedLayer], memory.draft.layers)
        # True if the products of the layers take their inputs in fp8.
        self._fp8 = isinstance(self._layers[0].o_proj, Fp8Linear)

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        self._passes += 1
        memory, draft, kernels = self._memory, self._memory.draft, self._kernels.elementwise
        position_B1 = (self._base_B + self._passes)[:, None]
        streams_LBD = draft.embed_tokens.weight.new_empty(
            len(self._layers) + 1, len(tokens_B), draft.config.hidden_size
        )
        hidden_BD = streams_LBD[0].copy_(draft.embed_tokens(tokens_B))
        cosine_BK, sine_BK = (part.flatten(0, 2) for part in draft.rope(position_B1, hidden_BD.dtype))
        rows_BG = self._first_rows_BG + self._passes
        first, fp8 = self._layers[0], self._fp8
        normed_BD = kernels.norm(hidden_BD, first.input_layernorm.weight, first.eps, fp8=fp8)
        for index, layer in enumerate(self._layers):
            own_keys, own_values = self._own[:, index]
            pools = own_keys.view(-1, layer.head_dim), own_values.view(-1, layer.head_dim)
            projected_BE = layer.queries_keys_values_proj(normed_BD)
            queries = kernels.rotate_and_store(projected_BE, cosine_BK, sine_BK, rows_BG, *pools, layer.heads, 1)
            attended_BHK = self._kernels.attention.attend(
                queries[:, :, 0], memory.keys_NXGSK[index], memory.values_NXGSK[index], memory.positions_XS,
                self._slots_B, own_keys, own_values, self._base_B, self._passes, draft.draft,
            )  # fmt: skip
            more_BD = layer.o_proj(self._prepared(attended_BHK.flatten(1)))
            after = layer.post_attention_layernorm
            hidden_BD, normed_BD = kernels.add_norm(hidden_BD, more_BD, after.weight, layer.eps, fp8=fp8)
            more_BD = layer.down_proj(self._prepared(kernels.silu_mul(layer.gate_up_proj(normed_BD))))
            last = index + 1 == len(self._layers)
            weight_D = draft.norm.weight if last else self._layers[index + 1].input_layernorm.weight
            hidden_BD, normed_BD = kernels.add_norm(
                hidden_BD, more_BD, weight_D, layer.eps, streams_LBD[index + 1], fp8=fp8 and not last
            )
        if draft.draft.feedback and self._passes + 1 < self._k:
            self._remember(draft.feedback(streams_LBD[:, :, None])[:, :, 0], cosine_BK, sine_BK, rows_BG)
        self.hidden_BD = normed_BD
        return draft.unembed(normed_BD)

    def _remember(self, feedback_NBD: Tensor, cosine_BK: Tensor, sine_BK: Tensor, rows_BG: Tensor) -> None:
        """Replace this pass's keys and values by those of the feedback memory."""
        kernels = self._kernels.elementwise
        for index, layer in enumerate(self._layers):
            normed_BD = kernels.norm(feedback_NBD[index], layer.input_layernorm.weight, layer.eps, fp8=self._fp8)
            projected_BE = layer.queries_keys_values_proj(normed_BD, layer.heads * layer.head_dim)
            pools = (own.view(-1, layer.head_dim) for own in self._own[:, index])
            kernels.rotate_and_store(projected_BE, cosine_BK, sine_BK, rows_BG, *pools, 0, 1)

    def _prepared(self, x_BD: Tensor) -> Tensor | Rows8:
        """The input of a product, in fp8 if the products take it so."""
        return cast(Rows8, self._kernels.elementwise.quantise(x_BD)) if self._fp8 else x_BD
