"""Limits follow what steps take: nobody is stuck who computes as fast as ever, and who is stuck is found."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from spire.service.pace import MULTIPLE, Pace, limit

FLOOR = 30.0
SECONDS = st.floats(0.001, 1000)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(clock)


@pytest.mark.fault(33)
@given(st.lists(st.tuples(st.sampled_from(["prompt", "verify"]), st.integers(1, 2048), SECONDS), min_size=1))
def test_a_step_as_long_as_its_like_is_never_stuck(steps: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    pace = Pace(clock)
    for kind, size, seconds in steps:
        pace.observe(kind, size, seconds)
    for kind, size, _ in steps:
        with pace.step(kind, size):
            clock.now += pace.expected(kind, size)
            assert not pace.is_stuck(0.0)


@given(SECONDS, st.integers(1, 64), st.integers(0, 10))
def test_a_larger_step_than_any_before_has_time_in_proportion(seconds: float, size: int, doublings: int) -> None:
    pace = Pace(Clock())
    pace.observe("prompt", size, seconds)
    assert pace.expected("verify", size << doublings) == pytest.approx(seconds * 2**doublings)


@pytest.mark.fault(33)
def test_an_endless_step_is_stuck_after_a_multiple_of_what_its_like_took(clock: Clock, pace: Pace) -> None:
    pace.observe("verify", 4, 10.0)
    with pace.step("verify", 4):
        clock.now += MULTIPLE * 10.0
        assert not pace.is_stuck(FLOOR)
        clock.now += 0.1
        assert pace.is_stuck(FLOOR)
    assert not pace.is_stuck(FLOOR), "it has ended"


def test_a_quick_model_is_stuck_at_the_floor(clock: Clock, pace: Pace) -> None:
    pace.observe("verify", 4, 0.01)
    pace.work()
    clock.now += FLOOR + 0.1
    assert pace.is_stuck(FLOOR)


def test_who_waits_for_work_is_never_stuck(clock: Clock, pace: Pace) -> None:
    pace.work()
    pace.rest()
    clock.now += 1e6
    assert not pace.is_stuck(FLOOR)


def test_one_step_in_which_the_machine_slept_sets_no_limit(pace: Pace) -> None:
    for seconds in (0.1, 0.1, 3600.0, 0.1):
        pace.observe("verify", 4, seconds)
    assert pace.step_seconds == 0.1


def test_short_steps_do_not_make_long_ones_forgotten(pace: Pace) -> None:
    pace.observe("prompt", 512, 40.0)
    for _ in range(1000):
        pace.observe("verify", 4, 0.1)
    assert limit(pace.step_seconds, FLOOR) == MULTIPLE * 40.0


def test_a_step_that_fails_says_nothing_of_how_long_one_takes(clock: Clock, pace: Pace) -> None:
    def fail() -> None:
        with pace.step("verify", 4):
            clock.now += 5
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert pace.step_seconds == 0.0


def test_of_two_steps_the_one_that_is_no_outlier_sets_limits(pace: Pace) -> None:
    for seconds in (600.0, 1.0):
        pace.observe("verify", 4, seconds)
    assert pace.step_seconds == 1.0


@pytest.mark.fault(33)
def test_a_step_of_many_forwards_has_time_for_each_of_them(clock: Clock, pace: Pace) -> None:
    pace.observe("prompt", 4, 10.0)
    with pace.step("draft 16", 4, forwards=16):
        assert pace.step_seconds == 160.0
        for _ in range(16):
            pace.work()
            clock.now += 10.0
            assert not pace.is_stuck(FLOOR)
