"""The target's forward, except for logits, by one CPU kernel: `spire/kernels/target.h`.

Called layer by layer, a forward of few rows spends most of its time on dispatch, and each operation may have to wait
for the interpreter lock. A target that drafts for itself (MagicDec) also draws its tokens by a kernel.

Shapes: B sequences, T positions, R = B * T rows, N layers, D width, K head width, V vocabulary, k
passes of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from spire.decoding.drafting import DraftingRound
from spire.decoding.randomness import Purpose
from spire.decoding.sampling import SamplingRows
from spire.kernels import Kernels
from spire.model.attention.fused_attention import FusedAttention, FusedPools
from spire.model.backends.cpu.fused_layer import MOST_ROTATIONS, FusedLayer, FusedNorm, Rotations
from spire.model.backends.cpu.fused_sampling import KernelSampling, draw
from spire.model.target import Target


class FusedStack:
    """All layers of a packed target as one CPU kernel. The target must outlive this object."""

    def __init__(self, target: Target, kernels: Kernels):
        layers = cast(Sequence[FusedLayer], target.layers)
        self._config, self._kernels, self._rotations = target.config, kernels, Rotations(target.rope, kernels.dtype)
        self._eps = layers[0].eps
        self._embedding_VD = target.embed_tokens.weight.detach()
        self._norm_D = cast(FusedNorm, target.norm).weight.detach()
        self._weights = torch.tensor([layer.addresses for layer in layers], dtype=torch.int64)
        # The pools of the last call, and per layer the addresses of its weights and of these pools' keys and values.
        self._layers: tuple[FusedPools | None, Tensor] = None, self._weights

    def takes(self, attentions: Sequence[FusedAttention]) -> bool:
        """True if the kernel supports these attentions: at least one, none beyond position MOST_ROTATIONS."""
        return bool(attentions) and max(attention.end for attention in attentions) <= MOST_ROTATIONS

    def __call__(
        self, tokens_BT: Tensor, attentions: Sequence[FusedAttention], tapped_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the target's layers: return the hidden states [B, T, D] after the final norm, and the activations
        [B, T, taps, D] entering the tapped layers, or None if no layer is tapped.

        `tokens_BT` concatenates the rows of `attentions`. Raises IndexError for a token outside the vocabulary.
        """
        config, pools = self._config, attentions[0].pools
        B, T = tokens_BT.shape
        R, D, V = B * T, config.hidden_size, config.vocab_size
        H, G, K, F = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size
        firsts = accumulate((attention.rows for attention in attentions), initial=0)
        stretches = torch.tensor([(first, *it.stretch) for first, it in zip(firsts, attentions, strict=False)])
        rotations = self._rotations.until(max(attention.end for attention in attentions))
        tapped, tokens = torch.tensor(tapped_layers), tokens_BT.contiguous()
        scratch = torch.empty(R * (3 * D + K * (2 * H + 2 * G + 2) + F), dtype=self._kernels.dtype)
        taps_BTND = torch.empty(B, T, len(tapped_layers), D, dtype=self._kernels.dtype)
        out_BTD = torch.empty(B, T, D, dtype=self._kernels.dtype)
        if self._layers[0] is not pools:
            self._layers = pools, torch.cat((self._weights, pools.addresses_N2), dim=1)
        given = (self._layers[1], stretches, tapped, tokens, self._embedding_VD, self._norm_D, *rotations)
        shape = (R, len(self._weights), D, H, G, K, F, V, len(rotations[0]), pools.columns)
        tensors, counts = (*given, scratch, taps_BTND, out_BTD), (len(attentions), len(tapped_layers))
        self._kernels.forward(*tensors, self._eps, *counts, *shape, *pools.strides, torch.get_num_threads())
        return out_BTD, taps_BTND if tapped_layers else None

    def drawn(
        self, round_: DraftingRound, newest_B: Tensor, rows: SamplingRows, base_B: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """Run a round's passes and draw from each by one kernel; return tokens and q as `FusedRound.drawn` does."""
        B, V = len(newest_B), self._config.vocab_size
        sampling, uniforms_KB = (
            KernelSampling.of(rows, base_B, V),
            rows.uniforms(base_B, k, Purpose.DRAFT).T.contiguous(),
        )
        tokens_KB, probs_BKV = newest_B.new_empty(k, B), torch.empty(B, k, V, dtype=torch.bfloat16)
        fed_B = newest_B
        for step, tokens_B in enumerate(tokens_KB):
            logits_BV = round_.next_logits(fed_B)
            draw(self._kernels, logits_BV, sampling, step, uniforms_KB[step], tokens_B, probs_BKV[:, step])
            fed_B = tokens_B
        return tokens_KB.T, probs_BKV
