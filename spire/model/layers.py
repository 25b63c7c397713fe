"""One Llama layer, shared by target and draft, by training and serving.

A layer asks whoever keeps the keys to attend for it: the target's cache keeps its own, the SPIRe draft's memory makes
them from memory vectors. Names of the parameters are Hugging Face's.

Shapes: B sequences, T new positions, S attended positions, D width, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spire.model.config import ModelConfig, RopeConfig
from spire.model.linears import Linears

# From queries [B, H, T, K] and the keys and values [B, G, T, K] of the same new positions to what was attended,
# [B, H, T, K]. What else is attended, and what is remembered, is the business of whoever keeps the keys.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# Cosines, and sines with those of the first half negated.
Rotation = tuple[Tensor, Tensor]


class Rope(nn.Module):
    """Rotary position embedding in Llama's half-split form, with `linear` and `llama3` stretching."""

    def __init__(self, head_dim: int, config: RopeConfig):
        super().__init__()
        # Not a buffer: `.to(bfloat16)` would round it, and bf16 cannot tell positions apart.
        self.inverse_frequencies = _inverse_frequencies(head_dim, config)

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and signed sines, each [B, 1, T, K], computed in fp32."""
        if self.inverse_frequencies.device != positions_BT.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions_BT.device)
        angles_BTK = positions_BT[:, None, :, None].float() * self.inverse_frequencies
        cosine, sine = angles_BTK.cos(), angles_BTK.sin()
        return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


def _inverse_frequencies(head_dim: int, config: RopeConfig) -> Tensor:
    # On the CPU also where a model is made without memory: these are no weights that are read into it later.
    frequencies = config.rope_theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        share = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        share = share.clamp(0, 1)
        return frequencies * (share + (1 - share) / config.factor)
    return frequencies


def rotate(x_BHTK: Tensor, rope: Rotation) -> Tensor:
    """Rotate queries or keys to their positions."""
    cosine, signed_sine = rope
    return x_BHTK * cosine + x_BHTK.roll(x_BHTK.shape[-1] // 2, dims=-1) * signed_sine


def pairs_to_halves(weight_ED: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys (or their bias, [E]) that rotate by neighbouring pairs, as rows that rotate by halves."""
    return weight_ED.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight_ED.shape)


def attend(queries_BHTK: Tensor, keys_BGSK: Tensor, values_BGSK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """Softmax attention with grouped queries, [B, H, T, K].

    `mask` is additive, or None for causal attention of a sequence over itself. Every row must see at least one key.
    """
    grouped = keys_BGSK.shape[1] != queries_BHTK.shape[1]
    if mask_B1TS is None:
        return F.scaled_dot_product_attention(queries_BHTK, keys_BGSK, values_BGSK, is_causal=True, enable_gqa=grouped)
    # Of single queries the CPU's own kernel makes a third of the time of two products.
    alone = queries_BHTK.shape[2] == 1 and queries_BHTK.device.type == "cpu" and not grouped
    if alone or torch.is_grad_enabled():
        return F.scaled_dot_product_attention(
            queries_BHTK, keys_BGSK, values_BGSK, attn_mask=mask_B1TS, enable_gqa=grouped
        )
    # Queries of one group become rows of one product, so that each key and value byte is read once.
    B, H, T, K = queries_BHTK.shape
    G = keys_BGSK.shape[1]
    queries = (queries_BHTK * K**-0.5).reshape(B, G, H // G * T, K)
    scores = (queries @ keys_BGSK.mT).view(B, G, H // G, T, -1) + mask_B1TS[:, :, None]
    return (scores.softmax(dim=-1).view(B, G, H // G * T, -1) @ values_BGSK).view(B, H, T, K)


def additive(visible_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as the [B, 1, T, S] summand of attention scores."""
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device).masked_fill(~visible_BTS, hidden)[
        :, None
    ]


class RMSNorm(nn.RMSNorm):
    """Root mean square normalisation.

    On a CPU it is nine operations. Of x and -x side by side the mean is 0 and the variance x's mean square, so
    LayerNorm, which is one, gives the same numbers.
    """

    def forward(self, x_D: Tensor) -> Tensor:
        if x_D.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(x_D)
        D = x_D.shape[-1]
        both, weights = torch.cat((x_D, -x_D), dim=-1), torch.cat((self.weight, self.weight))
        return F.layer_norm(both, (2 * D,), weights, None, self.eps or torch.finfo(x_D.dtype).eps)[..., :D].contiguous()


class Attention(Linears):
    """The four projections, of inputs that are normalised already."""

    together = (("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj"), ("o_proj",))

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, K = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.kv_heads = K, kv_heads
        self.q_proj = nn.Linear(D, heads * K, bias=config.attention_bias)
        self.k_proj = nn.Linear(D, kv_heads * K, bias=config.attention_bias)
        self.v_proj = nn.Linear(D, kv_heads * K, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * K, D, bias=config.attention_bias)

    def queries_keys_values(self, x_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, K] and keys, both rotated, and values [B, G, T, K]."""
        rotated, values = self._rotated(self.project(x_BTD, "q_proj", "k_proj", "v_proj"), rope)
        queries, keys = rotated.split((rotated.shape[1] - self.kv_heads, self.kv_heads), dim=1)
        return queries, keys, values

    def keys_values(self, x_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values [B, G, T, K]."""
        return self._rotated(self.project(x_BTD, "k_proj", "v_proj"), rope)

    def output(self, attended_BHTK: Tensor) -> Tensor:
        """What was attended, as a summand of the residual stream."""
        return self.project(attended_BHTK.transpose(1, 2).flatten(2), "o_proj")

    def _rotated(self, projected_BTE: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """All heads but those of values, rotated at once, and values."""
        heads_BHTK = projected_BTE.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        to_rotate, values = heads_BHTK.split((heads_BHTK.shape[1] - self.kv_heads, self.kv_heads), dim=1)
        return rotate(to_rotate, rope), values


class MLP(Linears):
    """SwiGLU."""

    together = (("gate_proj", "up_proj"), ("down_proj",))

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, F_ = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, F_, bias=config.mlp_bias)
        self.up_proj = nn.Linear(D, F_, bias=config.mlp_bias)
        self.down_proj = nn.Linear(F_, D, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.project(x_BTD, "gate_proj", "up_proj").chunk(2, dim=-1)
        return self.project(F.silu(gate) * up, "down_proj")


class Layer(nn.Module):
    """RMSNorm, attention, residual, RMSNorm, SwiGLU, residual."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def queries_keys_values(self, input_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """What attention is asked with: queries [B, H, T, K], keys and values [B, G, T, K]."""
        return self.self_attn.queries_keys_values(self.input_layernorm(input_BTD), rope)

    def keys_values(self, memory_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, T, K] of memory vectors that stand where the layer's own input would."""
        return self.self_attn.keys_values(self.input_layernorm(memory_BTD), rope)

    def behind(self, input_BTD: Tensor, attended_BHTK: Tensor) -> Tensor:
        """The layer's output [B, T, D] for `input` and what its queries found."""
        hidden_BTD = input_BTD + self.self_attn.output(attended_BHTK)
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))

    def forward(self, input_BTD: Tensor, rope: Rotation, attend: Attend) -> Tensor:
        """The layer's output [B, T, D] for `input`."""
        return self.behind(input_BTD, attend(*self.queries_keys_values(input_BTD, rope)))
