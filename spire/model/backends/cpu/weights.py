"""Weights in the layout of the CPU kernels: numbers of the model's type, bfloat16 of a float32 model, or fp8.

A decoding step takes as long as reading the weights. Where a model computes in float32, weights that bfloat16 holds
exactly (those of most checkpoints) are stored so, and kernels widen them: half of the bytes, the same results.

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
    """A weight [E, D] in the layout of the CPU kernels, and the scales of its outputs [E] if its values are fp8.

    `narrow`: the values are bfloat16, and the model computes in float32.
    """

    # [E / block, D / pair, block, pair]. `pair` is 2 for a bfloat16 model, which multiplies in pairs, else 1.
    values: Tensor
    scale_E: Tensor | None
    narrow: bool

    @classmethod
    def of(cls, weight_ED: Tensor, kernels: Kernels, fp8: bool = False) -> BlockedWeight:
        """Store a weight: rounded if `fp8`, otherwise exactly, in as few bytes as its numbers need."""
        values_ED, scale_E = fp8_of(weight_ED) if fp8 else (weight_ED, None)
        narrow = values_ED.dtype == torch.float32 and is_bfloat16(values_ED)
        E, D = weight_ED.shape
        pair = torch.float32.itemsize // kernels.dtype.itemsize
        stored_ED = values_ED.bfloat16() if narrow else values_ED
        blocks = stored_ED.view(E // kernels.block, kernels.block, D // pair, pair).transpose(1, 2)
        return cls(blocks.contiguous(), scale_E, narrow)

    @property
    def outputs(self) -> int:
        return self.values.shape[0] * self.values.shape[2]

    def from_output(self, first: int) -> BlockedWeight:
        """Return the outputs from number `first` on, a multiple of a block."""
        values = self.values[first // self.values.shape[2] :]
        return BlockedWeight(values, None if self.scale_E is None else self.scale_E[first:], self.narrow)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """The fields as tables for kernels contain them, valid while the weight lives."""
        return self.values.data_ptr(), 0 if self.scale_E is None else self.scale_E.data_ptr(), int(self.narrow)


def is_bfloat16(weight_ED: Tensor) -> bool:
    """True if bfloat16 holds every number of a float32 weight exactly."""
    parts = weight_ED.split(_OUTPUTS_AT_ONCE)
    return all(torch.equal(part_ED.bfloat16().float(), part_ED) for part_ED in parts)


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
