"""What `experiments/turns.py` says of pairs: nothing where there is nothing, and a loss where one is planted."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import typer

from experiments.turns import check_own, summary


def pairs(ratio: float, count: int = 60) -> list[tuple[float, float]]:
    """Rates that swing by a tenth by themselves, and by a third from pair to pair."""
    chance = random.Random(3)
    found = []
    for _ in range(count):
        pace = 300 * chance.uniform(0.8, 1.2)
        found.append((pace * chance.gauss(1, 0.1), pace * ratio * chance.gauss(1, 0.1)))
    return found


def test_two_states_of_one_speed_are_told_apart_by_nothing() -> None:
    low, high = summary(pairs(1.0))["interval"]
    assert 0.9 < low < 1.0 < high < 1.1


def test_a_loss_of_a_tenth_is_seen() -> None:
    figures = summary(pairs(0.9))
    low, high = figures["interval"]
    assert low < figures["ratio"] < high < 1


@pytest.mark.processes
def test_a_directory_without_the_product_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no spire of its own"):
        check_own(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
