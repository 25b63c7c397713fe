"""The decoder layer of every model family, shared by target and draft, and by training and serving.

The layer is Llama's, with options for other families (`families`): biases of queries, keys and values, norms of
queries and keys. A layer leaves attention to the owner of the keys: the target's cache stores the layer's own keys, the
SPIRe draft's memory computes keys from memory vectors. Parameter names are Hugging Face's.

Shapes: B sequences, T new positions, S attended positions, D width, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spire.model.config import ModelConfig, RopeConfig

# Maps queries [B, H, T, K], keys and values [B, G, T, K] of new positions to the output of attention [B, H, T, K]. The
# owner of the keys decides which other positions are attended and what is stored.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# Cosines and signed sines: the sines of the first half are negated.
Rotation = tuple[Tensor, Tensor]


class Memory(Protocol):
    """The keys and values, of every layer, that the new positions of one forward attend to."""

    @property
    def positions_BT(self) -> Tensor: ...

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        """Store one layer's keys and values of the new positions, and return its attention output [B, H, T, K]."""


class Rope(nn.Module):
    """Rotary position embedding in Llama's half-split form, with `linear` and `llama3` frequency scaling."""

    def __init__(self, head_dim: int, config: RopeConfig):
        super().__init__()
        # On the CPU even for a model on the meta device: unlike weights, frequencies are not loaded later.
        frequencies = config.rope_theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
        if config.rope_type == "linear":
            frequencies = frequencies / config.factor
        elif config.rope_type == "llama3":
            turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
            share = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
            share = share.clamp(0, 1)
            frequencies = frequencies * (share + (1 - share) / config.factor)
        # Not a buffer: `.to(bfloat16)` would round it, and bf16 cannot tell positions apart.
        self.inverse_frequencies = frequencies

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotation:
        """Return rotary cosines and signed sines, each [B, 1, T, K], computed in fp32 and converted to `dtype`."""
        if self.inverse_frequencies.device != positions_BT.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions_BT.device)
        angles_BTK = positions_BT[:, None, :, None].float() * self.inverse_frequencies
        cosine, sine = angles_BTK.cos(), angles_BTK.sin()
        return torch.cat((cosine, cosine), dim=-1).to(dtype), torch.cat((-sine, sine), dim=-1).to(dtype)


def rotate(x_BHTK: Tensor, rope: Rotation) -> Tensor:
    """Apply rotary position embeddings to queries or keys."""
    cosine, signed_sine = rope
    return x_BHTK * cosine + x_BHTK.roll(x_BHTK.shape[-1] // 2, dims=-1) * signed_sine


def pairs_to_halves(weight_ED: Tensor, head_dim: int) -> Tensor:
    """Permute query or key weights [E, D], or biases [E], from interleaved to half-split rotary embeddings."""
    return weight_ED.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight_ED.shape)


def attend(queries_BHTK: Tensor, keys_BGSK: Tensor, values_BGSK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """Compute softmax attention with grouped queries; return [B, H, T, K].

    `mask_B1TS` is additive, or None for causal self-attention. Every query must attend to at least one key.
    """
    if mask_B1TS is None or torch.is_grad_enabled():
        given = (queries_BHTK, keys_BGSK, values_BGSK, mask_B1TS)
        causal, grouped = mask_B1TS is None, keys_BGSK.shape[1] != queries_BHTK.shape[1]
        return F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=grouped)
    # Queries of one group become rows of one product, so that each key and value byte is read once.
    B, H, T, K = queries_BHTK.shape
    G = keys_BGSK.shape[1]
    queries = (queries_BHTK * K**-0.5).reshape(B, G, H // G * T, K)
    scores = (queries @ keys_BGSK.mT).view(B, G, H // G, T, -1) + mask_B1TS[:, :, None]
    return (scores.softmax(dim=-1).view(B, G, H // G * T, -1) @ values_BGSK).view(B, H, T, K)


def additive(visible_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean attention mask [B, T, S] to an additive one [B, 1, T, S]."""
    zeros_BTS = torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device)
    return zeros_BTS.masked_fill(~visible_BTS, torch.finfo(dtype).min)[:, None]


class Attention(nn.Module):
    """The query, key, value and output projections of attention, and the norms of queries and keys, if the model has
    them. Inputs must be normalised."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, K = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.kv_heads = K, kv_heads
        self.q_proj = nn.Linear(D, heads * K, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, kv_heads * K, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, kv_heads * K, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * K, D, bias=config.attention_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(K, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def queries(self, x_BTD: Tensor, rope: Rotation) -> Tensor:
        """Project normalised inputs to rotated queries [B, H, T, K]."""
        return rotate(self.q_norm(self.heads(self.q_proj(x_BTD))), rope)

    def keys_values(self, x_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Project normalised inputs to keys and values, each [B, G, T, K]; keys are rotated."""
        return rotate(self.k_norm(self.heads(self.k_proj(x_BTD))), rope), self.heads(self.v_proj(x_BTD))

    def heads(self, projected_BTE: Tensor) -> Tensor:
        """Split the output of a projection into heads, [B, heads, T, K]."""
        return projected_BTE.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """The feed-forward part of a layer, a SwiGLU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, F_ = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, F_, bias=config.mlp_bias)
        self.up_proj = nn.Linear(D, F_, bias=config.mlp_bias)
        self.down_proj = nn.Linear(F_, D, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    """A decoder layer: RMSNorm, attention, residual, RMSNorm, SwiGLU, residual."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def queries_keys_values(self, input_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries [B, H, T, K], keys and values [B, G, T, K]; queries and keys are rotated."""
        attention, x_BTD = self.self_attn, self.input_layernorm(input_BTD)
        return attention.queries(x_BTD, rope), *attention.keys_values(x_BTD, rope)

    def keys_values(self, memory_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys (rotated) and values [B, G, T, K] computed from memory vectors instead of the layer's input."""
        return self.self_attn.keys_values(self.input_layernorm(memory_BTD), rope)

    def behind(self, input_BTD: Tensor, attended_BHTK: Tensor) -> Tensor:
        """Return the layer's output [B, T, D], given its input and the attention output of every head."""
        hidden_BTD = input_BTD + self.self_attn.o_proj(attended_BHTK.transpose(1, 2).flatten(2))
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))

    def forward(self, input_BTD: Tensor, rope: Rotation, attend: Attend) -> Tensor:
        """Return the layer's output [B, T, D]."""
        return self.behind(input_BTD, attend(*self.queries_keys_values(input_BTD, rope)))


class Decoder(nn.Module):
    """The base of target and draft: embedding, layers, norm and unembedding. Parameter names are Hugging Face's.

    `outputs`: the number of tokens that the unembedding covers; None: the whole vocabulary.
    """

    def __init__(self, config: ModelConfig, outputs: int | None = None):
        super().__init__()
        self.config = config
        embedding_VD = torch.empty(config.vocab_size, config.hidden_size)
        if not embedding_VD.is_meta:  # for a draw that draws nothing torch would import its compiler: seconds
            nn.init.normal_(embedding_VD)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding_VD, freeze=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm: nn.Module = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, outputs or config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rope = Rope(config.head_dim, config.rope)
        # Set by a backend: a kernel that replaces the unembedding.
        self.fused_head: Callable[[Tensor], Tensor] | None = None

    def replace_head(self, head: Callable[[Tensor], Tensor]) -> None:
        """Unembed by `head` from now on, and drop the weight of `lm_head`; a tied embedding keeps its weight."""
        self.fused_head = head
        self.lm_head.weight = None  # type: ignore[assignment]

    def unembed(self, hidden_D: Tensor) -> Tensor:
        """Return fp32 logits [..., V] of hidden states [..., D] that have passed the final norm."""
        return (self.fused_head or self.lm_head)(hidden_D).float()
