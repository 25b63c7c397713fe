"""Several batch views in one forward, so that weights are read once for all of them: verification beside prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from spire.model.cache.target_cache import BatchView


class Stretches:
    """Several batch views, concatenated to one row of R positions; each attends separately. Implements KeyValues."""

    def __init__(self, views: Sequence[BatchView]):
        self._views = views
        ends = accumulate((prod(view.shape) for view in views), initial=0)
        self._rows = [slice(*bounds) for bounds in pairwise(ends)]
        parts = [view.fused for view in views]
        self.fused = [part for fused in parts for part in fused] if all(parts) else []

    @cached_property
    def positions_BT(self) -> Tensor:
        """The positions of all views, concatenated to [1, R]."""
        return torch.cat([view.positions_BT.flatten() for view in self._views])[None]

    def attend(self, layer: int, queries_1HRK: Tensor, keys_1GRK: Tensor, values_1GRK: Tensor) -> Tensor:
        attended = []
        given = (queries_1HRK, keys_1GRK, values_1GRK)
        for view, rows in zip(self._views, self._rows, strict=True):
            stretch = [x[0, :, rows].unflatten(1, view.shape).transpose(0, 1) for x in given]
            attended.append(view.attend(layer, *stretch).transpose(0, 1).flatten(1, 2))
        return torch.cat(attended, dim=1)[None]

    def split(self, of_1R: Tensor) -> list[Tensor]:
        """Split the output [1, R, ...] of a forward into one tensor [B, T, ...] for each view."""
        return [of_1R[0, rows].unflatten(0, view.shape) for view, rows in zip(self._views, self._rows, strict=True)]
