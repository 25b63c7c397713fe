"""The gateway's heart before a verifier in memory, on a clock of its own: minutes are tested in milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest

from gateway.config import GatewayConfig
from gateway.engine import Engine
from gateway.errors import NoVerifier, PeerLost, ReaderTooSlow
from gateway.metrics import Metrics
from gateway.sequence import Sampling, Sequence
from tests.fake_clock import run
from tests.gateway.fake_verifier import FakeVerifier, continuation

_NUMBERS = count(1)


def sequence(prompt: int = 5, max_tokens: int = 8) -> Sequence:
    number = next(_NUMBERS)
    return Sequence(f"s{number}", [2 + number % 900] * prompt, Sampling(), max_tokens)


@asynccontextmanager
async def heart(verifier: FakeVerifier, **options: Any) -> AsyncIterator[Engine]:
    """The engine of a gateway that has met this verifier."""
    config = GatewayConfig(_cli_parse_args=[], **options)
    with patch("gateway.peers.connect", verifier.connect):
        engine = Engine(config, Metrics(config.lanes))
    await engine.handshake()
    engine.open()
    await until(lambda: engine.verifier.usable)
    try:
        yield engine
    finally:
        await engine.close()


async def until(true: Any, within: float = 600.0) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < within, f"not within {within} s of fake time"
        await asyncio.sleep(0.001)


async def ended(*sequences: Sequence) -> None:
    await until(lambda: all(one.finished for one in sequences))


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


def test_a_frozen_verifier_is_left_at_a_rounds_deadline_and_its_sequences_go_on_elsewhere_in_time() -> None:
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


def test_whoever_kills_every_verifier_that_computes_it_is_given_up() -> None:
    async def scenario() -> None:
        verifier = FakeVerifier()
        poison = sequence()

        def dies(ids: list[str]) -> None:
            if any(wire_id.startswith(f"{poison.id}.") for wire_id in ids):
                asyncio.get_running_loop().call_soon(verifier.die)
                asyncio.get_running_loop().call_later(1, verifier.revive)

        verifier.in_step = dies
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
            with patch("gateway.engine.MOST_UNREAD_BYTES", 100 * 200):
                engine.submit([unread, read, whole])
                await ended(unread, read, whole)
            assert isinstance(unread.error, ReaderTooSlow)
            assert len(unread.output) == 101
            assert (read.error, whole.error) == (None, None)
            assert len(read.output) == len(whole.output) == 200

    run(scenario())
