"""Layers whose projections of one input are one matrix product: query, key and value; gate and up.

Shapes: B sequences, T positions, D width, E outputs, H query heads, G key/value heads, K head width, F inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spire.model.layers import Layer, Rotation, rotate


class PackedLayer(Layer):
    """A layer with packed projections. Takes the parameters of a layer, which is of no use afterwards."""

    def __init__(self, layer: Layer):
        nn.Module.__init__(self)
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim, self.kv_heads = attention.head_dim, attention.kv_heads
        self.heads = attention.q_proj.out_features // self.head_dim
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.eps = self.input_layernorm.eps or torch.finfo(attention.q_proj.weight.dtype).eps
        self.queries_keys_values_proj: nn.Module = packed(attention.q_proj, attention.k_proj, attention.v_proj)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.o_proj: nn.Module = attention.o_proj
        self.down_proj: nn.Module = mlp.down_proj
        self.gate_up_proj: nn.Module = packed(mlp.gate_proj, mlp.up_proj)

    def queries_keys_values(self, input_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        heads_BHTK = self._heads(self.queries_keys_values_proj(self.input_layernorm(input_BTD)))
        queries, keys, values = heads_BHTK.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return rotate(self.q_norm(queries), rope), rotate(self.k_norm(keys), rope), values

    def keys_values(self, memory_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        projected_BTE = self.queries_keys_values_proj(self.input_layernorm(memory_BTD), self.heads * self.head_dim)
        keys, values = self._heads(projected_BTE).chunk(2, dim=1)
        return rotate(self.k_norm(keys), rope), values

    def behind(self, input_BTD: Tensor, attended_BHTK: Tensor) -> Tensor:
        hidden_BTD = input_BTD + self.o_proj(attended_BHTK.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden_BTD)).chunk(2, dim=-1)
        return hidden_BTD + self.down_proj(F.silu(gate) * up)

    def _heads(self, projected_BTE: Tensor) -> Tensor:
        return projected_BTE.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class PackedLinear(nn.Linear):
    """A linear layer of which the outputs from number `first` on can be computed alone."""

    def forward(self, input: Tensor, first: int = 0) -> Tensor:
        return F.linear(input, self.weight[first:], None if self.bias is None else self.bias[first:])


def packed(*linears: nn.Linear) -> PackedLinear:
    """Return one linear layer that computes the outputs of all, and drop their weights one by one."""
    first = linears[0].weight
    sizes = [linear.out_features for linear in linears]
    with torch.device("meta"):
        whole = PackedLinear(first.shape[1], sum(sizes), bias=linears[0].bias is not None)
    weight = first.new_empty(sum(sizes), first.shape[1])
    for part_ED, linear in zip(weight.split(sizes), linears, strict=True):
        part_ED.copy_(linear.weight.detach())
        linear.weight = None  # type: ignore[assignment]
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if whole.bias is not None:
        biases = torch.cat([linear.bias.detach() for linear in linears if linear.bias is not None])
        whole.bias = nn.Parameter(biases, requires_grad=False)
    return whole
