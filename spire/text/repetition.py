"""Repetition: models that go round in circles write the same words, or the same letters, again and again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# A text goes round in circles if fewer of its 4-grams are distinct.
LEAST_DISTINCT, _N = 0.5, 4


def goes_in_circles(text: str) -> bool:
    """True if a text is blank, or if too few of the 4-grams of its words, or of its characters, are distinct.

    Characters are for text without spaces. Of those of a long text, most 4-grams occur again, so only a tenth of them
    has to be distinct.
    """
    few = distinct_share(text) < LEAST_DISTINCT / 5 or distinct_share(text.split()) < LEAST_DISTINCT
    return few or not text.strip()


def distinct_share(parts: Sequence[Hashable], n: int = _N) -> float:
    """Return the share of distinct n-grams of a text, given as its tokens or words; 1 for a text without any."""
    grams = [tuple(parts[at : at + n]) for at in range(len(parts) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
