"""Repetition is told by the share of distinct 4-grams."""

from __future__ import annotations

import pytest

from spire.text.repetition import distinct_share


@pytest.mark.parametrize(
    ("tokens", "share"), [([1, 2, 3, 4, 5], 1.0), ([7] * 20, 1 / 17), ([1, 2, 3, 4] * 5, 4 / 17), ([1, 2], 1.0)]
)
def test_the_share_of_distinct_4_grams_tells_repetition(tokens: list[int], share: float) -> None:
    assert distinct_share(tokens) == pytest.approx(share)
