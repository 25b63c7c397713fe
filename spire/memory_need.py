"""Memory that a device needs to serve a target, a draft, or both: weights, and keys and values of each sequence.

Pure arithmetic. What it does not know: the runtime's own memory and what a forward needs in passing. These have what
services leave of the memory that is free when weights are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spire.model.paging import positions_of
from spire.shapes import Draft, Shape

# Of the memory that is free behind the weights, what a service takes for its sequences. The rest is for activations,
# weights' copies and whoever else is on this machine.
SHARE_OF_FREE_MEMORY = 0.8


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes: `weights` once, `per_sequence` for each sequence."""

    weights: float
    per_sequence: float

    def bytes(self, batch: int) -> float:
        return self.weights + batch * self.per_sequence


def largest_batch(needs: Sequence[MemoryNeed], memory_bytes: float) -> int:
    """Sequences that fit a device where these are loaded one after the other; 0 where not even one fits.

    Each takes its share of what those before it, with all their sequences, have left behind its weights.
    """
    most, before = math.inf, MemoryNeed(0.0, 0.0)
    for need in needs:
        free = memory_bytes - before.weights - need.weights
        # batch * its own <= share * (free - batch * that before it)
        one = need.per_sequence + SHARE_OF_FREE_MEMORY * before.per_sequence
        most = min(most, SHARE_OF_FREE_MEMORY * free / one)
        before = MemoryNeed(before.weights + need.weights, before.per_sequence + need.per_sequence)
    return max(0, math.floor(most))


def of_target(target: Shape, context: int, bytes_per_value: float, tied: bool = False) -> MemoryNeed:
    """Memory for sequences of `context` positions, in whole pages. `tied`: embedding and unembedding are one matrix."""
    per_sequence = positions_of(context) * target.kv_values_per_position
    return MemoryNeed(target.parameters(tied) * bytes_per_value, per_sequence * bytes_per_value)


def of_draft(draft: Draft, context: int, k: int, bytes_per_value: float) -> MemoryNeed:
    """MagicDec needs nothing of its own; what others remember has room for k drafted positions more."""
    if draft.kind == "magicdec":
        return MemoryNeed(0.0, 0.0)
    positions = draft.cached_positions(context) + k
    per_sequence = positions * draft.shape.kv_values_per_position
    return MemoryNeed(draft.shape.parameters() * bytes_per_value, per_sequence * bytes_per_value)
