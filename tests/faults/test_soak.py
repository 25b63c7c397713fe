"""What the soak calls growth: a leak, however much of the load's memory comes and goes beside it."""

from __future__ import annotations

import random

import pytest

from tests.faults.soak import MOST_GROWTH, grown


def resident(leak: float, seed: int) -> list[int]:
    """Bytes of a process that takes 6 % more now and then, more often by and by, and leaks so much in all."""
    rng, series = random.Random(seed), list[int]()
    for at in range(300):
        busy = rng.random() < 0.2 + 0.4 * at / 300
        series.append(int(100e6 * (1 + 0.06 * busy + 0.002 * rng.random() + leak * at / 300)))
    return series


@pytest.mark.parametrize("seed", range(5))
def test_load_that_comes_and_goes_is_no_growth_and_a_leak_is(seed: int) -> None:
    assert grown(resident(0.0, seed)) < MOST_GROWTH
    assert grown(resident(0.04, seed)) > MOST_GROWTH
