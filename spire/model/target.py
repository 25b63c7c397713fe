"""The target: a decoder of any served family, with one forward.

Prefill, verification and plain decoding are the same call with different numbers of new tokens. Training is the same
call with a cache that stores nothing. The forward also returns the inputs of the tapped layers, for the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from spire.model.layers import Decoder, Layer, Memory, attend


class KeyValues(Memory, Protocol):
    """The target's KV cache during one forward."""

    @property
    def fused(self) -> Sequence[Any]:
        """Attention by a backend's kernels; empty unless the kernels support every row of the forward."""


class WholeSequence:
    """Causal attention within B whole sequences, without a KV cache, for training and teacher forcing."""

    def __init__(self, tokens_BT: Tensor):
        B, T = tokens_BT.shape
        self.positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
        self.fused: Sequence[Any] = ()

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        return attend(queries_BHTK, keys_BGTK, values_BGTK, None)


class TargetOutput(NamedTuple):
    """The target's hidden states after the final norm, to be unembedded where needed, and its tapped activations."""

    hidden_BTD: Tensor
    taps_BTND: Tensor | None


class Target(Decoder):
    """The target model, which maps token ids to hidden states and tapped activations."""

    def forward(self, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...] = ()) -> TargetOutput:
        """Run the target on T new tokens per sequence and append their keys and values to `cache`.

        `tapped_layers` are layer indices: i taps the activation *entering* layer i (0 is the embedding).
        """
        hidden_BTD = self.embed_tokens(tokens_BT)
        rope = self.rope(cache.positions_BT, hidden_BTD.dtype)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(cast(Iterable[Layer], self.layers)):
            taps[index] = hidden_BTD
            hidden_BTD = layer(hidden_BTD, rope, partial(cache.attend, index))
        taps_BTND = torch.stack([taps[i] for i in tapped_layers], dim=2) if tapped_layers else None
        return TargetOutput(self.norm(hidden_BTD), taps_BTND)
