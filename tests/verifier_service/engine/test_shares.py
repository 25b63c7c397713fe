"""Slots and prefill are shared fairly between gateways, and none is left idle for the sake of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, strategies as st

from spire.errors import OutOfCapacity
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import prompt_of, slow_steps
from tests.verifier_service.serve.test_lifetimes import until
from verifier_service.engine.sequence import StartTask
from verifier_service.engine.slots import Waiting


def task(name: str, gateway: str) -> StartTask:
    return cast(StartTask, SimpleNamespace(start=pb.Start(sequence_id=name), gateway=gateway))


@given(gateways=st.lists(st.sampled_from("abc"), min_size=1, max_size=40), places=st.integers(1, 12))
def test_gateways_are_served_in_order_and_lead_waiting_ones_by_at_most_one(gateways: list[str], places: int) -> None:
    waiting, held, served = Waiting(40), Counter[str](), list[StartTask]()
    for number, gateway in enumerate(gateways):
        waiting.add(task(str(number), gateway))
    while held.total() < places and (next_ := waiting.next(held)):
        del waiting[next_.start.sequence_id]
        held[next_.gateway] += 1
        served.append(next_)
    assert held.total() == min(places, len(gateways))
    assert all(held[gateway] <= held[other.gateway] + 1 for gateway in held for other in waiting.values())
    for gateway in "abc":
        order = [int(one.start.sequence_id) for one in served if one.gateway == gateway]
        assert order == [number for number, whose in enumerate(gateways) if whose == gateway][: len(order)]


def test_more_than_a_gateway_can_ever_use_do_not_wait() -> None:
    waiting = Waiting(2)
    for name in "ab":
        waiting.add(task(name, "one"))
    with pytest.raises(OutOfCapacity, match="2 sequences of this gateway wait"):
        waiting.add(task("c", "one"))
    waiting.add(task("d", "other"))


@pytest.mark.fault(22, 31)
async def test_a_gateway_with_all_slots_yields_its_youngest_until_both_have_half(
    running: Running,
) -> None:
    async with running(max_sequences=4) as verifier:
        flood, other = verifier.client("flood"), verifier.client("other")
        for name in "abcd":
            assert (await flood.start(name, prompt_of(20, seed=ord(name)))).status.code == codes.CODE_OK
        for name in "xyz":
            await other.send_start(name, prompt_of(20))
        assert [(await other.read()).started.sequence_id for _ in range(2)] == ["x", "y"]
        results = await flood.verify(*(pb.VerifyItem(sequence_id=name, round=1) for name in "abcd"))
        assert [result.status.code for result in results] == [codes.CODE_OK] * 2 + [codes.CODE_RESOURCE_EXHAUSTED] * 2
        assert [*verifier.engine.sequences] == ["a", "b", "x", "y"]
        await flood.release("a")
        assert (await other.read()).started.sequence_id == "z"


async def test_what_nobody_waits_for_is_free_for_all(running: Running) -> None:
    async with running(max_sequences=3) as verifier:
        flood, other = verifier.client("flood"), verifier.client("other")
        for name in "abc":
            assert (await flood.start(name, prompt_of(20, seed=ord(name)))).status.code == codes.CODE_OK
        await other.send_start("x", prompt_of(20))
        assert (await other.read()).started.status.code == codes.CODE_OK
        await flood.send_start("d", prompt_of(20))
        await until(lambda: bool(verifier.engine.slots.waiting))
        await other.release("x")
        assert (await flood.read()).started.sequence_id == "d"


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
