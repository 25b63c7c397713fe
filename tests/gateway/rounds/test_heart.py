"""The gateway's heart before a verifier in memory, on a clock of its own: minutes are tested in milliseconds."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import patch

import pytest

from gateway.errors import NoVerifier, PeerLost, ReaderTooSlow
from gateway.rounds.scheduler import MAX_FRUITLESS_LIVES
from gateway.sequence import Sequence
from tests.fake_clock import run
from tests.gateway.fake_verifier import FakeVerifier, continuation
from tests.gateway.heart import ended, heart, sequence, until


def test_an_hour_of_waiting_takes_no_time() -> None:
    began = time.perf_counter()

    async def scenario() -> float:
        before = time.monotonic()
        await asyncio.sleep(3600)
        return time.monotonic() - before

    assert 3600 <= run(scenario()) < 3601
    assert time.perf_counter() - began < 10


def test_texts_are_those_of_the_target_however_many_are_decoded_together() -> None:
    async def scenario() -> None:
        async with heart(FakeVerifier()) as engine:
            several = [sequence(max_tokens=20 + n) for n in range(10)]
            engine.submit(several)
            await ended(*several)
            for one in several:
                assert one.output == continuation(one.prompt, one.max_tokens)
                assert one.finish_reason == "length"

    run(scenario())


def test_a_verifier_that_comes_back_in_time_costs_no_request_and_no_token() -> None:
    async def scenario() -> None:
        verifier = FakeVerifier()
        async with heart(verifier, verifier_patience=30) as engine:
            one = sequence(max_tokens=50)
            engine.submit([one])
            await until(lambda: len(one.output) > 20)
            verifier.die()
            await asyncio.sleep(29)
            verifier.revive()
            await ended(one)
            assert one.output == continuation(one.prompt, 50)

    run(scenario())


def test_a_verifier_that_stays_away_is_waited_for_as_long_as_was_said() -> None:
    async def scenario() -> None:
        verifier = FakeVerifier()
        async with heart(verifier, verifier_patience=30) as engine:
            one = sequence(max_tokens=50)
            engine.submit([one])
            await until(lambda: len(one.output) > 20)
            verifier.die()
            died = time.monotonic()
            await ended(one)
            assert isinstance(one.error, NoVerifier)
            assert 30 <= time.monotonic() - died < 31

    run(scenario())


def test_a_frozen_verifier_is_left_at_the_deadline_and_sequences_resume() -> None:
    async def scenario() -> None:
        verifier = FakeVerifier()
        async with heart(verifier, verify_deadline=30) as engine:
            one = sequence(max_tokens=50)
            engine.submit([one])
            await until(lambda: len(one.output) > 20)
            verifier.freeze()
            froze = time.monotonic()
            await until(lambda: not engine.verifier.up)
            assert time.monotonic() - froze <= 31
            verifier.die()
            verifier.revive()
            await ended(one)
            assert one.output == continuation(one.prompt, 50)

    run(scenario())


def killed_by(verifier: FakeVerifier, poison: Sequence) -> None:
    """Let each step that computes `poison` kill the verifier, which comes back a second later."""

    def dies(ids: list[str]) -> None:
        if any(wire_id.startswith(f"{poison.id}.") for wire_id in ids):
            asyncio.get_running_loop().call_soon(verifier.die)
            asyncio.get_running_loop().call_later(1, verifier.revive)

    verifier.in_step = dies


def test_whoever_kills_every_verifier_that_computes_it_is_given_up() -> None:
    async def scenario() -> None:
        verifier = FakeVerifier()
        poison = sequence()
        killed_by(verifier, poison)
        async with heart(verifier) as engine:
            engine.submit([poison])
            await ended(poison)
            assert isinstance(poison.error, PeerLost)
            other = sequence()
            await until(lambda: engine.verifier.usable)
            engine.submit([other])
            await ended(other)
            assert other.output == continuation(other.prompt, 8)

    run(scenario())


@pytest.mark.fault(14)
def test_a_stream_that_nobody_reads_ends_at_what_may_be_left_unread() -> None:
    async def scenario() -> None:
        async with heart(FakeVerifier()) as engine:
            unread, read, whole = (sequence(max_tokens=200) for _ in range(3))

            def take() -> None:
                read.heard = len(read.output)

            read.listener, whole.hears_rounds = take, False
            with patch("gateway.rounds.outcomes.MOST_UNREAD_BYTES", 100 * 200):
                engine.submit([unread, read, whole])
                await ended(unread, read, whole)
            assert isinstance(unread.error, ReaderTooSlow)
            assert len(unread.output) == 101
            assert (read.error, whole.error) == (None, None)
            assert len(read.output) == len(whole.output) == 200

    run(scenario())


@pytest.mark.fault(34)
def test_ten_deaths_in_half_a_minute_lose_none_of_64_requests_that_wait() -> None:
    """Each life is long enough to read a few prompts: what was not being read is not to blame for its end."""

    async def scenario() -> None:
        verifier = FakeVerifier(slots=32, budget=64, step_seconds=0.1)
        async with heart(verifier, max_batch=32) as engine:
            waiting = [sequence(300, 20) for _ in range(64)]
            for one in waiting:
                engine.submit([one])
            for _ in range(10):
                await asyncio.sleep(2)
                verifier.die()
                await asyncio.sleep(1)
                verifier.revive()
            assert not any(one.finished and one.error for one in waiting)
            await ended(*waiting)
            for one in waiting:
                assert one.output == continuation(one.prompt, 20)

    run(scenario())


@pytest.mark.fault(34)
def test_a_prompt_that_kills_four_verifiers_is_given_up_but_not_its_mates() -> None:
    async def scenario() -> None:
        verifier = FakeVerifier(budget=64)
        poison, *others = (sequence(100, 4) for _ in range(20))
        killed_by(verifier, poison)
        async with heart(verifier) as engine:
            for one in (poison, *others):
                engine.submit([one])
            await ended(poison, *others)
            assert isinstance(poison.error, PeerLost)
            for one in others:
                assert one.output == continuation(one.prompt, 4)

    run(scenario())


def test_prompts_that_a_stuck_verifier_does_not_read_are_started_again() -> None:
    """Although it says itself that it does not serve."""

    async def scenario() -> None:
        verifier = FakeVerifier()
        async with heart(verifier, start_deadline=120, verifier_patience=1000) as engine:
            verifier.freeze()
            one = sequence()
            engine.submit([one])
            await until(lambda: bool(engine.scheduler.starting))
            engine.verifier.serving = False
            await until(lambda: not engine.scheduler.starting, within=130)
            verifier.die()
            verifier.revive()
            await ended(one)
            assert one.output == continuation(one.prompt, 8)

    run(scenario())


@pytest.mark.fault(34)
def test_wires_that_break_while_a_prompt_is_read_are_no_deaths() -> None:
    async def scenario() -> None:
        verifier, cuts = FakeVerifier(), 3 * MAX_FRUITLESS_LIVES
        one = sequence()

        def cut(ids: list[str]) -> None:
            nonlocal cuts
            if cuts and any(wire_id.startswith(f"{one.id}.") for wire_id in ids):
                cuts -= 1
                asyncio.get_running_loop().call_soon(verifier.cut)

        verifier.in_step = cut
        async with heart(verifier) as engine:
            engine.submit([one])
            await ended(one)
            assert cuts == 0
            assert one.output == continuation(one.prompt, 8)

    run(scenario())


@pytest.mark.fault(34)
def test_who_was_computed_beside_a_killer_is_not_given_up_with_it() -> None:
    async def scenario() -> None:
        verifier = FakeVerifier()
        others, poison = [sequence() for _ in range(6)], sequence()
        killed_by(verifier, poison)
        async with heart(verifier) as engine:
            engine.submit([*others[:3], poison, *others[3:]])
            await ended(poison, *others)
            assert isinstance(poison.error, PeerLost)
            assert [one.output for one in others] == [continuation(one.prompt, 8) for one in others]

    run(scenario())
