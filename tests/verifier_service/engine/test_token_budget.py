"""A step reads as much prompt as takes about as long as a step should."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from verifier_service.engine.prompts import TokenBudget


def settled(plain: float, each: float) -> tuple[TokenBudget, list[int]]:
    """A budget after steps of `plain` seconds and `each` per position of prompts, and what they were."""
    budget, taken = TokenBudget(0), []
    for _ in range(9):
        budget.observe_plain(plain)
    for _ in range(40):
        taken.append(budget.positions)
        budget.observe(budget.positions, plain + each * budget.positions)
    return budget, taken


@given(st.floats(0, 10), st.floats(1e-5, 10))
def test_no_step_much_exceeds_half_a_second_or_twice_a_promptless_one(plain: float, each: float) -> None:
    budget, taken = settled(plain, each)
    assert budget.positions == 64 or plain + each * budget.positions <= 1.1 * max(0.5, 2 * plain) + each
    assert all(later <= 2 * max(taken[: at + 1]) for at, later in enumerate(taken[1:])), (
        "none is far from what is known"
    )


@pytest.mark.parametrize(("plain", "each"), [(0.001, 0.0002), (40.0, 0.0), (5.0, 0.001)])
def test_what_costs_little_is_read_at_once(plain: float, each: float) -> None:
    budget, _ = settled(plain, each)
    assert budget.positions == 512


def test_a_target_that_takes_long_for_a_position_reads_the_fewest() -> None:
    _, taken = settled(0.1, 2.0)
    assert set(taken) == {64}


def test_a_budget_grows_again_when_the_machine_is_no_more_busy() -> None:
    budget, _ = settled(0.01, 0.0005)
    before = budget.positions
    for _ in range(40):
        budget.observe(budget.positions, 3.0)
    assert budget.positions == 64 < before
    for _ in range(40):
        budget.observe(budget.positions, 0.01 + 0.0005 * budget.positions)
    assert budget.positions == before


@given(st.integers(1, 4096), st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e3))))
def test_a_budget_that_was_given_stays(given_positions: int, steps: list[tuple[int, float]]) -> None:
    budget = TokenBudget(given_positions)
    for positions, seconds in steps:
        budget.observe_plain(seconds)
        budget.observe(positions, seconds)
    assert budget.positions == given_positions


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4096), st.floats(0, 1e3)), min_size=1))
def test_a_budget_is_between_64_and_512_whatever_is_measured(steps: list[tuple[bool, int, float]]) -> None:
    budget = TokenBudget(0)
    for plain, positions, seconds in steps:
        if plain:
            budget.observe_plain(seconds)
        else:
            budget.observe(positions, seconds)
        assert 64 <= budget.positions <= 512
