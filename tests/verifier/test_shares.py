"""Slots and prefill are shared fairly between gateways, and none is left idle for the sake of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spire.errors import OutOfCapacity
from tests.verifier.conftest import Running
from tests.verifier.harness import prompt_of, slow_steps
from verifier_service.slots import Shares


class Slots:
    """Admissions and ends by one clock, as the verifier sees them."""

    def __init__(self, total: int):
        self.total, self.shares, self.held, self.now = total, Shares(total), Counter[str](), 0.0

    def ask(self, gateway: str) -> bool:
        self.now += 0.01
        try:
            self.shares.check(gateway, self.held, self.now)
        except OutOfCapacity:
            return False
        if self.held.total() == self.total:
            self.shares.refused(gateway, self.now)
            return False
        self.shares.admitted(gateway)
        self.held[gateway] += 1
        return True


def test_one_gateway_alone_may_have_everything() -> None:
    slots = Slots(8)
    assert [slots.ask("a") for _ in range(9)] == [True] * 8 + [False]


@pytest.mark.fault(22)
def test_who_came_first_gives_way_until_both_have_half() -> None:
    slots = Slots(8)
    for _ in range(8):
        slots.ask("a")
    assert not slots.ask("b")
    for _ in range(8):
        slots.held["a"] -= 1
        slots.ask("a")
        slots.ask("b")
    assert slots.held == {"a": 4, "b": 4}


def test_a_share_that_nobody_waits_for_any_more_is_free_again() -> None:
    slots = Slots(4)
    for _ in range(4):
        slots.ask("a")
    assert not slots.ask("b")
    slots.held["a"] -= 1
    assert not slots.ask("a")
    slots.now += 2.1
    assert slots.ask("a")


@given(order=st.lists(st.sampled_from("abc"), min_size=30, max_size=90), total=st.integers(6, 18))
def test_whoever_keeps_asking_comes_to_its_share_but_for_a_place_that_has_just_been_freed(
    order: list[str], total: int
) -> None:
    slots = Slots(total)
    for _ in range(total):
        slots.ask("a")
    for gateway in order:
        largest = slots.held.most_common(1)[0][0]
        slots.held[largest] -= 1
        for one in (gateway, *"abc"):
            slots.ask(one)
    assert slots.held.total() == total
    assert min(slots.held[one] for one in "abc") >= total // 3 - 1


def test_the_message_says_what_the_share_is() -> None:
    slots = Slots(4)
    for _ in range(4):
        slots.ask("a")
    slots.ask("b")
    with pytest.raises(OutOfCapacity, match="share of 2 of 4 slots"):
        slots.shares.check("a", slots.held, slots.now)


@pytest.mark.fault(22)
async def test_a_prompt_does_not_wait_for_all_of_another_gateways(running: Running) -> None:
    async with running(token_budget=4) as verifier:
        slow_steps(verifier)
        flood, other = verifier.client("flood"), verifier.client("other")
        for number in range(6):  # no two begin alike: that would be copied
            await flood.send_start(f"f{number}", prompt_of(150, seed=number))
        first = (await flood.read()).started
        await other.send_start("o", prompt_of(20))
        assert (await other.read()).started.sequence_id == "o"
        waiting = verifier.engine.sequences.values()
        assert sum(sequence.started is None for sequence in waiting) >= 3
        assert first.sequence_id == "f0"
        assert [(await flood.read()).started.sequence_id for _ in range(5)] == [f"f{number}" for number in range(1, 6)]
