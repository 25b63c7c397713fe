"""Layers that run two CPU kernels each, one before attention and one after it: `spire/kernels/layer.h`.

The results of a row do not depend on other rows or on the number of rows. With `fused_attention`, the results at a
position are therefore bitwise equal, whether the position is decoded plainly or verified, and in any batch.

No kernel adds biases to queries, keys and values or computes their norms: with these, only the kernel after attention
runs, and torch computes the rest, with results that may differ in the last bits from batch to batch.

Shapes: B sequences, T positions, R = B * T rows, D width, E outputs, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from spire.kernels import Kernels, kernels_for
from spire.model.backends.cpu.weights import BlockedWeight
from spire.model.config import ModelConfig
from spire.model.layers import Layer, Rope, Rotation

# The numbers of inputs and outputs of a matrix product must be multiples of this.
_MULTIPLE = 32
# The most positions whose rotations are cached: enough for long contexts, in less memory than their keys and values.
MOST_ROTATIONS = 2**18


def kernels_of(config: ModelConfig, weight: Tensor) -> Kernels | None:
    """Return the CPU kernels that support a whole model with this config and weights like `weight`, or None."""
    return None if config.qkv_bias or config.qk_norm else kernels_behind(config, weight)


def kernels_behind(config: ModelConfig, weight: Tensor) -> Kernels | None:
    """Return the CPU kernels that support such a model except, perhaps, its queries, keys and values, or None."""
    biased = config.attention_bias or config.mlp_bias
    widths = (config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size)
    if weight.device.type != "cpu" or biased or any(width % _MULTIPLE for width in widths):
        return None
    return kernels_for(weight.dtype)


def computed_by(config: ModelConfig, weight: Tensor) -> str:
    """Name, for people, what computes a model with this config and weights like `weight` on a CPU."""
    kernels, behind = kernels_for(weight.dtype), kernels_behind(config, weight)
    if not kernels or not (behind or kernels.attends(config.head_dim)):
        return "torch's own"
    if kernels_of(config, weight):
        return f"C, {kernels.name}"
    return f"C, {kernels.name}; torch's own for {'queries, keys and values' if behind else 'layers'}"


class PartlyFusedLayer(Layer):
    """A layer that a CPU kernel computes from attention's output on. Takes the parameters of another layer, which is of
    no use afterwards. Cannot be trained or saved."""

    def __init__(self, layer: Layer, kernels: Kernels, fp8: bool = False):
        nn.Module.__init__(self)
        self.kernels = kernels
        attention, mlp = layer.self_attn, layer.mlp
        self.inner = mlp.down_proj.in_features
        self.eps = layer.post_attention_layernorm.eps or torch.finfo(kernels.dtype).eps
        self._norm_inside = layer.post_attention_layernorm.weight.detach().contiguous()
        outputs = _weights(attention.o_proj, mlp.down_proj)
        self._output, self._down = (BlockedWeight.of(weight, kernels, fp8) for weight in outputs)
        # Half of the outputs of each block are of gate_proj, the other half are of up_proj.
        halves = [weight.unflatten(0, (-1, kernels.block // 2)) for weight in _weights(mlp.gate_proj, mlp.up_proj)]
        self._gate_and_up = BlockedWeight.of(torch.stack(halves, dim=1).flatten(0, 2), kernels, fp8)
        self._take_front(layer, fp8)

    def _take_front(self, layer: Layer, fp8: bool) -> None:
        """Take what computes queries, keys and values."""
        del layer.self_attn.o_proj
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn

    def behind(self, input_BTD: Tensor, attended_BHTK: Tensor) -> Tensor:
        (B, T, D), (_, H, _, K) = input_BTD.shape, attended_BHTK.shape
        given, attended_BTE = input_BTD.contiguous(), attended_BHTK.transpose(1, 2).contiguous()
        hidden, normed, out_BTD = torch.empty(3, B * T, D, dtype=self.kernels.dtype).unbind()
        inside = torch.empty(B * T, self.inner, dtype=self.kernels.dtype)
        weights = (*self._output, *self._gate_and_up, *self._down)
        tensors = (given, attended_BTE, self._norm_inside, *weights, hidden, normed, inside, out_BTD)
        shape = (B * T, D, H * K, self.inner)
        self.kernels.behind_attention(*tensors, self.eps, *shape, torch.get_num_threads())
        return out_BTD.view(B, T, D)


class FusedLayer(PartlyFusedLayer):
    """A layer with all weights in the layout of the CPU kernels. Cannot be trained or saved."""

    def _take_front(self, layer: Layer, fp8: bool) -> None:
        attention = layer.self_attn
        self.head_dim, self.kv_heads = attention.head_dim, attention.kv_heads
        self.heads = attention.q_proj.out_features // self.head_dim
        self._norm = layer.input_layernorm.weight.detach().contiguous()
        projections = _weights(attention.q_proj, attention.k_proj, attention.v_proj)
        self._queries_keys_values = BlockedWeight.of(torch.cat(projections), self.kernels, fp8)
        self._keys_values = self._queries_keys_values.from_output(self.heads * self.head_dim)

    @property
    def addresses(self) -> list[int]:
        """The addresses of the weights in the order that kernels expect, valid while the layer lives."""
        weights = (self._queries_keys_values, self._output, self._gate_and_up, self._down)
        table = chain.from_iterable(weight.addresses for weight in weights)
        return [self._norm.data_ptr(), self._norm_inside.data_ptr(), *table]

    def queries_keys_values(self, input_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        projected = self._projected(input_BTD, rope, self._queries_keys_values)
        kv = self.kv_heads
        return projected[:, : self.heads], projected[:, self.heads : -kv], projected[:, -kv:]

    def keys_values(self, memory_BTD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        projected = self._projected(memory_BTD, rope, self._keys_values)
        return projected[:, : self.kv_heads], projected[:, self.kv_heads :]

    def _projected(self, input_BTD: Tensor, rope: Rotation, weight: BlockedWeight) -> Tensor:
        """Normalise the inputs and project them by `weight` to heads [B, heads, T, K], rotated except for values."""
        B, T, D = input_BTD.shape
        E = weight.outputs
        given, normed = input_BTD.contiguous(), torch.empty(B * T, D, dtype=self.kernels.dtype)
        projected_RE, heads = torch.empty(B * T, E, dtype=self.kernels.dtype), E // self.head_dim
        tensors = (given, self._norm, *weight, *(part.contiguous() for part in rope), normed, projected_RE)
        shape = (B * T, D, E, heads - self.kv_heads, self.head_dim)
        self.kernels.before_attention(*tensors, self.eps, *shape, torch.get_num_threads())
        return projected_RE.view(B, T, heads, self.head_dim).transpose(1, 2)


class FusedNorm(nn.Module):
    """An RMSNorm by a CPU kernel, which computes each row independently of the other rows."""

    def __init__(self, norm: nn.RMSNorm, kernels: Kernels):
        super().__init__()
        self._kernels, self.weight = kernels, norm.weight
        self.eps = norm.eps or torch.finfo(kernels.dtype).eps

    def forward(self, x_D: Tensor) -> Tensor:
        given = x_D.contiguous()
        out_D, D = torch.empty_like(given), x_D.shape[-1]
        self._kernels.norm(given, self.weight, out_D, self.eps, x_D.numel() // D, D, torch.get_num_threads())
        return out_D


class Rotations:
    """A cache of the rotary cosines and signed sines of the first positions, which are expensive to compute."""

    def __init__(self, rope: Rope, dtype: torch.dtype):
        self._rope, self._dtype = rope, dtype
        self._kept_PK: tuple[Tensor, ...] = (torch.empty(0), torch.empty(0))

    def at(self, positions_R: Tensor, end: int) -> list[Tensor]:
        """Return the rotary cosines and signed sines, each [R, K], of R positions, which are all below `end`."""
        if end > MOST_ROTATIONS:
            return self._computed(positions_R)
        return [kept_PK.index_select(0, positions_R) for kept_PK in self.until(end)]

    def until(self, end: int) -> tuple[Tensor, ...]:
        """Return the rotary cosines and signed sines, each [P, K], of positions 0..P-1, P >= `end`, from the cache."""
        if end > len(self._kept_PK[0]):
            self._kept_PK = tuple(self._computed(torch.arange(1 << max(10, (end - 1).bit_length()))))
        return self._kept_PK

    def _computed(self, positions_R: Tensor) -> list[Tensor]:
        return [found_11RK[0, 0] for found_11RK in self._rope(positions_R[None], self._dtype)]


class FusedProduct:
    """A linear layer by a CPU kernel, with fp32 outputs because the kernel accumulates in fp32."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, fp8: bool = False):
        self._kernels = kernels
        self.weight = BlockedWeight.of(linear.weight.detach(), kernels, fp8)

    def __call__(self, x_D: Tensor) -> Tensor:
        given = x_D.contiguous()
        D, E = x_D.shape[-1], self.weight.outputs
        out_E = torch.empty(*x_D.shape[:-1], E)
        self._kernels.project(given, *self.weight, out_E, x_D.numel() // D, D, E, torch.get_num_threads())
        return out_E


def _weights(*linears: nn.Linear) -> list[Tensor]:
    return [linear.weight.detach() for linear in linears]
