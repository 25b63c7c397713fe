"""A step reads as much prompt as takes about as long as a step should."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.token_budget import TokenBudget


def settled(fixed: float, each: float, given: int = 0) -> tuple[TokenBudget, list[int]]:
    """A budget after steps of `fixed` seconds and `each` per position, and what they were."""
    budget, taken = TokenBudget(given), []
    for _ in range(20):
        taken.append(budget.positions)
        budget.observe(budget.positions, fixed + each * budget.positions)
    return budget, taken


@given(st.floats(0, 10), st.floats(1e-5, 10))
def test_no_step_takes_much_longer_than_half_a_second_or_twice_one_without_prompts(fixed: float, each: float) -> None:
    budget, taken = settled(fixed, each)
    assert budget.positions == 16 or fixed + each * budget.positions <= 1.1 * max(0.5, 2 * fixed) + each
    assert all(later <= 2 * max(taken[: at + 1]) for at, later in enumerate(taken[1:])), (
        "none is far beyond what is known"
    )


@pytest.mark.parametrize(("fixed", "each"), [(0.001, 0.0002), (40.0, 0.0), (5.0, 0.001)])
def test_what_costs_little_is_read_at_once(fixed: float, each: float) -> None:
    budget, _ = settled(fixed, each)
    assert budget.positions == 512


def test_a_target_that_takes_seconds_for_a_position_reads_the_fewest() -> None:
    _, taken = settled(0.1, 2.0)
    assert taken[1:] == [16] * 19


@given(st.integers(1, 4096), st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e3))))
def test_a_budget_that_was_given_stays(given_positions: int, steps: list[tuple[int, float]]) -> None:
    budget = TokenBudget(given_positions)
    for positions, seconds in steps:
        budget.observe(positions, seconds)
    assert budget.positions == given_positions


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 1e3)), min_size=1))
def test_a_budget_is_between_16_and_512_whatever_is_measured(steps: list[tuple[int, float]]) -> None:
    budget = TokenBudget(0)
    for positions, seconds in steps:
        budget.observe(positions, seconds)
        assert 16 <= budget.positions <= 512
