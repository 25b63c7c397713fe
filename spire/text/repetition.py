"""Repetition: models that go round in circles write the same words again and again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# A text goes round in circles if fewer of its 4-grams are distinct.
LEAST_DISTINCT, _N = 0.5, 4


def distinct_share(parts: Sequence[Hashable], n: int = _N) -> float:
    """Return the share of distinct n-grams of a text, given as its tokens or words; 1 for a text without any."""
    grams = [tuple(parts[at : at + n]) for at in range(len(parts) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
