"""What a device must hold to serve a target, a draft, or both: weights, and keys and values of each sequence.

Pure arithmetic. What it does not know: the runtime's own memory and what a forward needs in passing.
"""

from __future__ import annotations

from dataclasses import dataclass

from spire.shapes import Draft, Shape


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes: `weights` once, `per_sequence` for each sequence."""

    weights: float
    per_sequence: float

    def __add__(self, other: MemoryNeed) -> MemoryNeed:
        return MemoryNeed(self.weights + other.weights, self.per_sequence + other.per_sequence)

    def bytes(self, batch: int) -> float:
        return self.weights + batch * self.per_sequence

    def largest_batch(self, memory_bytes: float) -> int:
        """Sequences that fit beside the weights; 0 where not even one does."""
        return max(0, int((memory_bytes - self.weights) // self.per_sequence))


def of_target(target: Shape, context: int, bytes_per_value: float, tied: bool = False) -> MemoryNeed:
    """`tied`: embedding and unembedding are one matrix."""
    per_sequence = context * target.kv_values_per_position
    return MemoryNeed(target.parameters(tied) * bytes_per_value, per_sequence * bytes_per_value)


def of_draft(draft: Draft, context: int, k: int, bytes_per_value: float) -> MemoryNeed:
    """MagicDec needs nothing of its own; what others remember has room for k drafted positions more."""
    if draft.kind == "magicdec":
        return MemoryNeed(0.0, 0.0)
    positions = draft.cached_positions(context) + k
    per_sequence = positions * draft.shape.kv_values_per_position
    return MemoryNeed(draft.shape.parameters() * bytes_per_value, per_sequence * bytes_per_value)
