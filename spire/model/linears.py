"""Linear maps that read the same input, as one product where that is faster.

Packed, weights are what torch multiplies fastest on a CPU: side by side where they read the same input, bfloat16 in
oneDNN's own layout, float32 transposed. With the few rows of a decoding step a product takes half as long; in bfloat16
its numbers are the same bit for bit.

Shapes: D the width of the input, E of all outputs together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
Kind = TypeVar("Kind")


class Linears(nn.Module):
    """A module whose linear maps of one input are asked for together, by name."""

    # Those that are packed together.
    together: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[tuple[str, ...], Product] = {}

    def project(self, x_D: Tensor, *names: str) -> Tensor:
        """What these make of [..., D], side by side: [..., E]."""
        if packed := self._packed.get(names):
            return packed(x_D)
        made = [getattr(self, name)(x_D) for name in names]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def packed(self, kind: type[Kind], *names: str) -> Kind:
        """The product of this kind that these were packed into."""
        product = self._packed[names]
        assert isinstance(product, kind)
        return product

    def pack(self, product_of: Callable[[Sequence[nn.Linear]], Product] | None = None) -> None:
        """Let products, each of all that are packed together, take the place of the linear maps."""
        for names in self.together:
            self._packed[names] = (product_of or _Packed)([getattr(self, name) for name in names])
        for name in {name for names in self.together for name in names}:
            getattr(self, name).weight = None  # of tied weights the embedding keeps its own


class _Packed:
    def __init__(self, linears: Sequence[nn.Linear]):
        weight_ED = torch.cat([linear.weight.detach() for linear in linears])
        self._in_layout = weight_ED.dtype == torch.bfloat16
        if self._in_layout:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_ED, None)
        else:
            # From 16 rows to some dozens a product with two threads takes half as long with them.
            self._weight = weight_ED.T.contiguous().T
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x_D: Tensor) -> Tensor:
        if self._in_layout:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x_D, self._weight, self._bias, "none", [], "")
            return product
        return nn.functional.linear(x_D, self._weight, self._bias)
