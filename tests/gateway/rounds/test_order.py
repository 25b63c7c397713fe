"""Who is served when: first come, first served within a key, shares between keys and requests, nothing sent twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from gateway.sequence import LEAST_RUN, Sequence
from tests.fake_clock import run
from tests.gateway.fake_verifier import FakeVerifier, continuation
from tests.gateway.heart import ended, heart, sequence

Request = tuple[float, int, int]
REQUESTS = st.lists(
    st.tuples(st.floats(0, 0.2), st.sampled_from([3, 20, 90, 250]), st.integers(1, 40)), min_size=2, max_size=25
)


async def ask_in_turn(verifier: FakeVerifier, requests: list[Request]) -> list[Sequence]:
    """Requests of one key until all have ended: seconds after the one before it, prompt and max_tokens of each."""
    async with heart(verifier) as engine:
        sequences = [sequence(prompt, max_tokens) for _, prompt, max_tokens in requests]
        for one, (pause, _, _) in zip(sequences, requests, strict=True):
            await asyncio.sleep(pause)
            engine.submit([one])
        await ended(*sequences)
    for one in sequences:
        assert one.output == continuation(one.prompt, one.max_tokens)
    return sequences


def places(of: list[str], sequences: list[Sequence]) -> list[int]:
    """Which sequences these wire ids name, each where it is named first."""
    ids = [one.id for one in sequences]
    return [ids.index(name) for name in dict.fromkeys(wire_id.rsplit(".", 1)[0] for wire_id in of)]


@pytest.mark.fault(29)
@settings(max_examples=40, deadline=None)
@given(REQUESTS)
def test_first_come_is_first_admitted_and_first_answered_for_equal_prompts(
    requests: list[Request],
) -> None:
    """The cache holds a tenth of what is asked for, and one long one at least."""
    verifier = FakeVerifier(memory=max(400, sum(prompt + most for _, prompt, most in requests) // 10))
    sequences = run(ask_in_turn(verifier, requests))
    admitted = places(verifier.admitted, sequences)
    assert admitted == sorted(admitted)
    first = places(verifier.first_tokens, sequences)
    for length in {len(one.prompt) for one in sequences}:
        equal = [at for at in first if len(sequences[at].prompt) == length]
        assert equal == sorted(equal)


@pytest.mark.fault(29)
def test_a_prompt_that_finds_no_room_is_sent_once_and_waits_there() -> None:
    """Not again and again: whole prompts are no way to ask whether there is room."""
    verifier = FakeVerifier(memory=700)
    sequences = run(ask_in_turn(verifier, [(0.0, 200, 30)] * 40))
    assert len(verifier.starts) == len(sequences)
    assert len(verifier.admitted) == len(sequences)


@pytest.mark.fault(31)
def test_a_request_of_64_choices_is_one_among_others() -> None:
    verifier = FakeVerifier(slots=16)

    async def scenario() -> None:
        async with heart(verifier) as engine:
            many = [sequence(20, 400) for _ in range(64)]
            engine.submit(many)
            await asyncio.sleep(0.5)
            others = [sequence(20, 100) for _ in range(4)]
            for one in others:
                engine.submit([one])
            asked = time.monotonic()
            await ended(*others)
            assert time.monotonic() - asked < 2 * 100 * verifier.step_seconds, (
                "beside equals it would take half of that"
            )
            await ended(*many)
            for one in [*many, *others]:
                assert one.output == continuation(one.prompt, one.max_tokens)

    run(scenario())


@pytest.mark.fault(31)
@pytest.mark.parametrize("limits", [{"slots": 8}, {"memory": 1300}], ids=["places", "memory"])
def test_a_key_gets_its_share_of_what_another_one_holds(limits: dict[str, int]) -> None:
    verifier = FakeVerifier(**limits)

    async def scenario() -> None:
        async with heart(verifier) as engine:
            greedy = [sequence(100, 100) for _ in range(40)]
            for one in greedy:
                engine.submit([one], "greedy")
            await asyncio.sleep(0.5)
            modest = [sequence(100, 100) for _ in range(20)]
            for one in modest:
                engine.submit([one], "modest")
            await asyncio.sleep(0.6)
            shares = Counter(one.key for one in engine.scheduler.running.values())
            assert abs(shares["greedy"] - shares["modest"]) <= 2, shares
            await ended(*greedy, *modest)
            for one in [*greedy, *modest]:
                assert one.output == continuation(one.prompt, one.max_tokens)

    run(scenario())


@pytest.mark.fault(19, 31)
def test_who_gave_way_runs_for_a_while_before_it_does_again() -> None:
    verifier = FakeVerifier(slots=4)

    async def scenario() -> None:
        async with heart(verifier) as engine:
            many = [sequence(10, 200) for _ in range(12)]
            engine.submit(many)
            for _ in range(60):
                await asyncio.sleep(0.05)
                engine.submit([sequence(10, 7)])
            await ended(*many)
        assert max(one.life for one in many) > 2
        for one in many:
            later_lives = [verifier.generated[f"{one.id}.{life}"] for life in range(2, one.life)]
            assert all(tokens >= LEAST_RUN for tokens in later_lives), later_lives

    run(scenario())
