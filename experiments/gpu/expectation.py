"""The time that a step ought to take on today's path, from the copy rate alone. Counted, not fitted: see docs/gpu.md.

Weights are read once, and products take a fifth longer than a copy of them. Keys and values of whole slots are copied
for every layer and step, which reads and writes each byte, and the products read the copy: 4 times the bytes in all.
Scores are written and read by the products, the mask and the softmax, 6.7 times. The host launches some 33 operations a
layer.
"""

from __future__ import annotations

from spire.shapes import Shape

_PRODUCTS, _KEYS_AND_VALUES, _SCORES = 1.2, 4.0, 6.7
_LAUNCH_SECONDS = 4e-6
_LAUNCHES_A_LAYER = 33
# Of a draft's pass, k of which are a round's.
_LAUNCHES_A_PASS = 340


def step_seconds(shape: Shape, batch: int, context: int, tokens: int, rate: float) -> float:
    """A step of `tokens` new positions for each of `batch` sequences. `rate`: bytes a second of a copy."""
    weights = 2 * (shape.body_parameters + shape.vocab_size * shape.hidden_size)
    keys_and_values = 2 * batch * context * shape.kv_values_per_position
    scores = 2 * shape.layers * batch * shape.heads * tokens * context
    bytes_moved = _PRODUCTS * weights + _KEYS_AND_VALUES * keys_and_values + _SCORES * scores
    return bytes_moved / rate + shape.layers * _LAUNCHES_A_LAYER * _LAUNCH_SECONDS


def floor_seconds(shape: Shape, batch: int, context: int, rate: float) -> float:
    """The time that no step can beat: each weight, key and value read once."""
    weights = 2 * (shape.body_parameters + shape.vocab_size * shape.hidden_size)
    return (weights + 2 * batch * context * shape.kv_values_per_position) / rate


def draft_seconds(draft: Shape, k: int, rate: float) -> float:
    """k passes of a draft, whose memory is small."""
    weights = 2 * (draft.body_parameters + draft.vocab_size * draft.hidden_size)
    return k * (_PRODUCTS * weights / rate + _LAUNCHES_A_PASS * _LAUNCH_SECONDS)
