"""The time that a step ought to take on today's path, from the copy rate alone. Counted, not fitted: see docs/gpu.md.

The GPU reads weights once, and products take a fifth longer than a copy of them; it reads keys and values once. The
host launches some 35 operations a layer, each of which takes it 16 µs (measured beside an H200). Whichever takes longer
is waited for.
"""

from __future__ import annotations

from spire.perf.shapes import Shape

_PRODUCTS, _KEYS_AND_VALUES = 1.2, 1.05
_LAUNCH_SECONDS = 16e-6
_LAUNCHES_A_LAYER = 35
# Of a draft's pass, k of which are a round's.
_LAUNCHES_A_PASS = 400


def step_seconds(shape: Shape, batch: int, context: int, rate: float) -> float:
    """A step of a few new positions for each of `batch` sequences. `rate`: bytes a second of a copy."""
    keys_and_values = 2 * batch * context * shape.kv_values_per_position
    bytes_moved = _PRODUCTS * weight_bytes(shape) + _KEYS_AND_VALUES * keys_and_values
    return max(bytes_moved / rate, shape.layers * _LAUNCHES_A_LAYER * _LAUNCH_SECONDS)


def floor_seconds(shape: Shape, batch: int, context: int, rate: float) -> float:
    """The time that no step can beat: each weight, key and value read once."""
    return (weight_bytes(shape) + 2 * batch * context * shape.kv_values_per_position) / rate


def draft_seconds(draft: Shape, k: int, rate: float) -> float:
    """k passes of a draft, whose memory is small."""
    return k * max(_PRODUCTS * weight_bytes(draft) / rate, _LAUNCHES_A_PASS * _LAUNCH_SECONDS)


def weight_bytes(shape: Shape) -> int:
    """Bytes of the matrices that a step reads, in bfloat16: layers and unembedding."""
    return 2 * (shape.body_parameters + shape.vocab_size * shape.hidden_size)
