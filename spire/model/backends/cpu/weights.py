"""Weights in the layout of the CPU kernels, as numbers of the model's type or rounded to fp8.

Shapes: E outputs, D inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spire.kernels import Kernels

# A byte of fp8 is a sign, three bits e and four bits m: 2^(e - 7) (1 + m / 16). Its largest value; e = 0 in the upper
# bits of a float; the lower bits of a float that are dropped.
_LARGEST_FP8, _EXPONENT, _DROPPED = 1.9375, 120 << 4, 19

_OUTPUTS_AT_ONCE = 4096


class BlockedWeight(NamedTuple):
    """A weight [E, D] in the layout of the CPU kernels, and the scales of its outputs [E] if its values are fp8."""

    # [E / block, D / pair, block, pair]. `pair` is 2 for bfloat16, which is multiplied in pairs, and 1 for float32.
    values: Tensor
    scale_E: Tensor | None

    @classmethod
    def of(cls, weight_ED: Tensor, kernels: Kernels, fp8: bool = False) -> BlockedWeight:
        values_ED, scale_E = fp8_of(weight_ED) if fp8 else (weight_ED, None)
        E, D = weight_ED.shape
        pair = torch.float32.itemsize // kernels.dtype.itemsize
        blocks = values_ED.view(E // kernels.block, kernels.block, D // pair, pair).transpose(1, 2)
        return cls(blocks.contiguous(), scale_E)

    @property
    def outputs(self) -> int:
        return self.values.shape[0] * self.values.shape[2]

    def from_output(self, first: int) -> BlockedWeight:
        """Return the outputs from number `first` on, a multiple of a block."""
        values = self.values[first // self.values.shape[2] :]
        return BlockedWeight(values, None if self.scale_E is None else self.scale_E[first:])


def fp8_of(weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to fp8 as the CPU kernels read it: bytes [E, D] (uint8), and the scale of each output [E]."""
    parts = [_rounded(part_ED.float()) for part_ED in weight_ED.split(_OUTPUTS_AT_ONCE)]
    values, scales = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(scales)


def _rounded(weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    scale_E = (weight_ED.abs().amax(dim=1) / _LARGEST_FP8).clamp(min=1e-12)
    scaled_ED = weight_ED / scale_E[:, None]
    bits_ED = (scaled_ED.abs().view(torch.int32) + (1 << _DROPPED - 1)) >> _DROPPED
    magnitude_ED = (bits_ED - _EXPONENT).clamp(0, 127)
    return (magnitude_ED | (scaled_ED < 0).int() << 7).to(torch.uint8), scale_E


def of_fp8(values_ED: Tensor, scale_E: Tensor) -> Tensor:
    """Return the weight, in float32, that `fp8_of` rounded to these bytes."""
    magnitude_ED = ((values_ED.int() & 127) + _EXPONENT << _DROPPED).view(torch.float32)
    return torch.where(values_ED > 127, -magnitude_ED, magnitude_ED) * scale_E[:, None]
