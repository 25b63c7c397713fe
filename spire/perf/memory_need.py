"""Memory that a device needs to serve a target, a draft, or both: weights, and keys and values of each sequence.

Pure arithmetic. Does not know: the runtime's memory and temporary memory of a forward, for which services leave a share
of the memory that is free after loading weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from spire.model.cache.paging import positions_of
from spire.perf.shapes import DraftShape, Shape

# Share of the memory free after loading weights that a service takes for its sequences. The rest is for activations,
# copies of weights and other processes.
SHARE_OF_FREE_MEMORY = 0.8


class MemoryNeed(NamedTuple):
    """Memory that a model needs, in bytes: `weights` once, `per_sequence` for each sequence."""

    weights: float
    per_sequence: float

    def bytes(self, batch: int) -> float:
        return self.weights + batch * self.per_sequence


def largest_batch(needs: Sequence[MemoryNeed], memory_bytes: float) -> int:
    """Return the most sequences that fit into `memory_bytes` if the models are loaded in this order; 0 if none fits.

    A model's sequences get SHARE_OF_FREE_MEMORY of what its weights and the earlier models with their sequences leave.
    """
    most, before = math.inf, MemoryNeed(0.0, 0.0)
    for need in needs:
        free = memory_bytes - before.weights - need.weights
        # batch * need.per_sequence <= share * (free - batch * before.per_sequence)
        one = need.per_sequence + SHARE_OF_FREE_MEMORY * before.per_sequence
        most = min(most, SHARE_OF_FREE_MEMORY * free / one)
        before = MemoryNeed(before.weights + need.weights, before.per_sequence + need.per_sequence)
    return max(0, math.floor(most))


def of_target(target: Shape, context: int, bytes_per_value: float, tied: bool = False) -> MemoryNeed:
    """Return a target's memory need at `context` positions, in whole pages. `tied`: one matrix for both embeddings."""
    per_sequence = positions_of(context) * target.kv_values_per_position
    return MemoryNeed(target.parameters(tied) * bytes_per_value, per_sequence * bytes_per_value)


def of_draft(draft: DraftShape, context: int, k: int, bytes_per_value: float) -> MemoryNeed:
    """Return a draft's memory need, including k drafted positions. MagicDec has no weights, and takes whole pages."""
    positions, parameters = draft.cached_positions(context) + k, draft.shape.parameters()
    if draft.kind == "magicdec":
        positions, parameters = positions_of(positions), 0
    per_sequence = positions * draft.shape.kv_values_per_position
    return MemoryNeed(parameters * bytes_per_value, per_sequence * bytes_per_value)
