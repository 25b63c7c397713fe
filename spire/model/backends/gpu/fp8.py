"""Weights of a draft in fp8 (e4m3) on a GPU: half the bytes to read, by torch's products of fp8 matrices.

Each output of a product has a scale, and so has each row of its input. The draft then proposes slightly different
tokens, so τ may fall; the output of the system remains exactly the target's.

Shapes: R rows, D inputs, E outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from spire.errors import CheckpointError
from spire.model.backends.gpu.packed_layer import PackedLayer
from spire.model.draft import Draft

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# The scale of a row of zeros.
LEAST_SCALE = 1e-12
# torch's products take matrices whose sides are multiples of this.
_ALIGNMENT = 16
_PROJECTIONS = ("queries_keys_values_proj", "o_proj", "gate_up_proj", "down_proj")
_ROWS_AT_ONCE = 8192
NEEDED_CAPABILITY = (9, 0)


class Rows8(NamedTuple):
    """Rows in fp8, and the scale (fp32) by which each is multiplied."""

    values_RD: Tensor
    scale_R1: Tensor


class Fp8Linear(nn.Module):
    """A linear layer with weights in fp8. Takes the weight of another one, which is of no use afterwards."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        parts = [rows8(part_ED) for part_ED in linear.weight.detach().split(_ROWS_AT_ONCE)]
        self.weight = nn.Parameter(torch.cat([part.values_RD for part in parts]), requires_grad=False)
        self.scale_1E = torch.cat([part.scale_R1 for part in parts]).view(1, -1)
        self.bias = linear.bias
        linear.weight = None  # type: ignore[assignment]

    def forward(self, x_D: Tensor | Rows8, first: int = 0) -> Tensor:
        """Return the outputs from number `first` on, in bfloat16: [..., E] of inputs [..., D], [R, E] of `Rows8`."""
        x, leading = (x_D, x_D.values_RD.shape[:1]) if isinstance(x_D, Rows8) else (rows8(x_D), x_D.shape[:-1])
        values_RD, scale_R1 = x.values_RD.flatten(0, -2), x.scale_R1.view(-1, 1)
        weight_DE = self.weight[first:].t()
        out_RE = torch._scaled_mm(
            values_RD, weight_DE, scale_a=scale_R1, scale_b=self.scale_1E[:, first:], out_dtype=torch.bfloat16
        )
        out_RE = out_RE if self.bias is None else out_RE + self.bias[first:]
        return out_RE.view(*leading, -1)


def rows8(x_D: Tensor) -> Rows8:
    """Round rows [..., D] to fp8, in steps of torch: `elementwise` has kernels for it."""
    scale_1 = (x_D.float().abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return Rows8((x_D.float() / scale_1).to(FP8), scale_1)


def check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise CheckpointError unless this device multiplies matrices in fp8 and the draft computes in bfloat16."""
    if device.type != "cuda":
        raise CheckpointError(f"--quantization fp8 needs a GPU or a CPU, not {device.type}: leave it out")
    if (capability := torch.cuda.get_device_capability(device)) < NEEDED_CAPABILITY:
        name, has = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise CheckpointError(
            f"--quantization fp8 needs a GPU of compute capability 9.0 or above, and {name} has {has}: leave it out"
        )
    if dtype != torch.bfloat16:
        raise CheckpointError("--quantization fp8 computes in bfloat16: leave out --dtype, or say --dtype bfloat16")


def quantise(draft: Draft) -> None:
    """Replace the linear layers of a packed draft by `Fp8Linear`, the unembedding only if its size permits.

    Raises CheckpointError for layers whose sizes do not.
    """
    layers = cast(Sequence[PackedLayer], draft.layers)
    linears = [(layer, name, cast(nn.Linear, getattr(layer, name))) for layer in layers for name in _PROJECTIONS]
    if wrong := [linear for *_, linear in linears if not _fits(linear)]:
        raise CheckpointError(
            f"--quantization fp8 needs sizes that are multiples of {_ALIGNMENT}, and the draft has a matrix of "
            f"{' × '.join(map(str, wrong[0].weight.shape))}: leave it out"
        )
    for layer, name, linear in linears:
        setattr(layer, name, Fp8Linear(linear))
    if _fits(draft.lm_head):
        draft.lm_head = Fp8Linear(draft.lm_head)  # type: ignore[assignment]


def _fits(linear: nn.Linear) -> bool:
    return not any(size % _ALIGNMENT for size in linear.weight.shape)
