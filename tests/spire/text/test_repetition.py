"""Repetition is told by the share of distinct 4-grams."""

from __future__ import annotations

import pytest

from spire.text.repetition import distinct_share, goes_in_circles


@pytest.mark.parametrize(
    ("tokens", "share"), [([1, 2, 3, 4, 5], 1.0), ([7] * 20, 1 / 17), ([1, 2, 3, 4] * 5, 4 / 17), ([1, 2], 1.0)]
)
def test_the_share_of_distinct_4_grams_tells_repetition(tokens: list[int], share: float) -> None:
    assert distinct_share(tokens) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", " \n \n", "no and " * 60, "好的吗" * 60, "a" * 200])
def test_texts_that_go_round_in_circles_are_told(text: str) -> None:
    assert goes_in_circles(text)


def test_a_text_that_says_something_does_not_go_round_in_circles() -> None:
    words = [f"{number} times {other} is {number * other}." for number in range(10) for other in range(10)]
    assert not goes_in_circles(" ".join(words))
    assert not goes_in_circles("Paris")
    assert not goes_in_circles("人们常说时间就是金钱，但我们很少认真思考自己怎样度过每一天，也不知道将来会发生什么")
