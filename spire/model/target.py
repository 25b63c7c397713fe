"""The target: a Llama-architecture decoder with one forward.

Prefill, verification and plain decoding are the same call with a different number of new tokens. Training is the same
call with a cache that keeps nothing. The forward also returns the activations entering chosen layers, for the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from spire.model.backends.fused_attention import FusedAttention
from spire.model.backends.fused_target import FusedStack
from spire.model.config import ModelConfig
from spire.model.layers import Decoder, Layer, Memory, attend


class KeyValues(Memory, Protocol):
    """The cache of the target during one forward."""

    # Attention by this project's kernels; empty unless they serve every row of the forward.
    fused: Sequence[FusedAttention]


class WholeSequence:
    """No cache: all positions of B sequences at once, causal. For training and teacher forcing."""

    def __init__(self, tokens_BT: Tensor):
        B, T = tokens_BT.shape
        self.positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
        self.fused: Sequence[FusedAttention] = ()

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        return attend(queries_BHTK, keys_BGTK, values_BGTK, None)


class TargetOutput(NamedTuple):
    """The hidden states after the final norm (unembed the rows you need) and the tapped activations."""

    hidden_BTD: Tensor
    taps_BTND: Tensor | None


class Target(Decoder):
    """Token ids in, hidden states and tapped activations out."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        # Set by `pack`: a kernel in place of all layers at once where attention is fused.
        self.stack: FusedStack | None = None

    def forward(self, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...] = ()) -> TargetOutput:
        """Append T tokens per sequence to `cache`.

        `tapped_layers` are numbers of layers passed: i taps the activation *entering* layer i (0 is the embedding).
        """
        if self.stack and self.stack.takes(cache.fused):
            return TargetOutput(*self.stack(tokens_BT, cache.fused, tapped_layers))
        hidden_BTD = self.embed_tokens(tokens_BT)
        rope = self.rope(cache.positions_BT, hidden_BTD.dtype)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(cast(Iterable[Layer], self.layers)):
            taps[index] = hidden_BTD
            hidden_BTD = layer(hidden_BTD, rope, partial(cache.attend, index))
        taps_BTND = torch.stack([taps[i] for i in tapped_layers], dim=2) if tapped_layers else None
        return TargetOutput(self.norm(hidden_BTD), taps_BTND)
