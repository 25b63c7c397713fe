"""The target: a Llama-architecture decoder with one forward.

Prefill, verification and plain decoding are the same call with a different number of new tokens. Training is the
same call with a cache that keeps nothing. The draft's food, the activations entering chosen layers, is a local.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from spire.model.config import ModelConfig
from spire.model.fused_attention import FusedAttention
from spire.model.fused_layer import FusedNorm
from spire.model.fused_target import FusedStack
from spire.model.layers import Layer, RMSNorm, Rope, attend
from spire.model.linears import Linears


class KeyValues(Protocol):
    """What the target needs of a cache during one forward."""

    @property
    def positions_BT(self) -> Tensor: ...

    # Where kernels of ours attend for all of it; nowhere, or in parts, if it is empty.
    fused: Sequence[FusedAttention]

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        """Store the new positions' keys and values of one layer; what its queries find, [B, H, T, K]."""
        ...


class WholeSequence:
    """No cache: every position of B sequences at once, causal. What training and teacher forcing use."""

    def __init__(self, tokens_BT: Tensor):
        B, T = tokens_BT.shape
        self.positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
        self.fused: Sequence[FusedAttention] = ()

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        return attend(queries_BHTK, keys_BGTK, values_BGTK, None)


class TargetOutput(NamedTuple):
    """`hidden_BTD` after the final norm (unembed the rows you need) and `taps_BTND`, the tapped activations."""

    hidden_BTD: Tensor
    taps_BTND: Tensor | None


class Target(Linears):
    """Token ids in, hidden states and tapped activations out. Parameter names are Hugging Face's under `model.`."""

    together = (("lm_head",),)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm: nn.RMSNorm | FusedNorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rope = Rope(config.head_dim, config.rope)
        # All layers at once, over a cache where kernels attend: `pack` says so.
        self.stack: FusedStack | None = None

    def forward(self, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...] = ()) -> TargetOutput:
        """Append T tokens per sequence to `cache`.

        `tapped_layers` are counts of layers passed: the activation *entering* that layer (0 is the embedding).
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

    def unembed(self, hidden_D: Tensor) -> Tensor:
        """Logits in fp32 for any selection of hidden states [..., D]."""
        return self.project(hidden_D, "lm_head").float()
