"""The time that a step ought to take, from the copy rate alone. Counted, not fitted: see docs/gpu.md.

The GPU reads weights once, and products take a fifth longer than a copy of them; it reads keys and values once. The
host launches a CUDA graph, which takes it less time than the GPU needs for one layer.
"""

from __future__ import annotations

from spire.perf.shapes import Shape

PRODUCTS, _KEYS_AND_VALUES = 1.2, 1.05


def step_seconds(shape: Shape, batch: int, context: int, rate: float) -> float:
    """A step of a few new positions for each of `batch` sequences. `rate`: bytes a second of a copy."""
    keys_and_values = 2 * batch * context * shape.kv_values_per_position
    bytes_moved = PRODUCTS * weight_bytes(shape) + _KEYS_AND_VALUES * keys_and_values
    return bytes_moved / rate


def floor_seconds(shape: Shape, batch: int, context: int, rate: float) -> float:
    """The time that no step can beat: each weight, key and value read once."""
    return (weight_bytes(shape) + 2 * batch * context * shape.kv_values_per_position) / rate


def draft_seconds(draft: Shape, k: int, rate: float) -> float:
    """k passes of a draft, whose memory is small."""
    return k * PRODUCTS * weight_bytes(draft) / rate


def weight_bytes(shape: Shape) -> int:
    """Bytes of the matrices that a step reads, in bfloat16: layers and unembedding."""
    return 2 * (shape.body_parameters + shape.vocab_size * shape.hidden_size)
