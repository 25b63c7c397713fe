"""The verifier tells its pace, and a gateway waits as long as that asks for: no longer, no less."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.errors import PeerLost
from gateway.verifier_client import SentBatch, VerifierClient
from spire.service.pace import limit
from spire.v1 import tensor_pb2, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import GREEDY, Verifier, prompt_of, slow_steps

# Seconds that a gateway waits at least, and that a step takes.
FLOOR, STEP = 0.05, 0.4


class Gateway(VerifierClient):
    """A gateway's end of the stream, which counts how often it was lost."""

    def __init__(self, verifier: Verifier):
        self.started: asyncio.Queue[pb.Started] = asyncio.Queue()
        self.lost = 0
        super().__init__(
            verifier.address,
            "gateway",
            self.started.put_nowait,
            lambda standing: None,
            self._count_loss,
            lambda before, now: None,
        )

    def _count_loss(self) -> None:
        self.lost += 1

    async def tokens(self, asked: SentBatch) -> list[int]:
        return list((await self.answer(asked))[0].results[0].tokens)


@asynccontextmanager
async def met(verifier: Verifier) -> AsyncIterator[Gateway]:
    """A gateway that has met the verifier and begun a sequence."""
    gateway = Gateway(verifier)
    maintaining = asyncio.create_task(gateway.maintain())
    try:
        await until(lambda: gateway.usable)
        await gateway.start(pb.Start(sequence_id="a", tokens=prompt_of(12), sampling=GREEDY), 10)
        assert (await asyncio.wait_for(gateway.started.get(), 20)).status.code == tensor_pb2.CODE_OK
        yield gateway
    finally:
        maintaining.cancel()
        await asyncio.wait([maintaining])
        await gateway.close()


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - plain data
            await asyncio.sleep(0.01)


async def ask(gateway: Gateway, number: int) -> list[int]:
    request = pb.RoundsRequest()
    request.verify.items.add(sequence_id="a", round=number)
    return await gateway.tokens(await gateway.ask(request, FLOOR))


@pytest.mark.fault(33)
async def test_a_round_is_waited_for_as_long_as_the_verifiers_steps_take(running: Running) -> None:
    async with running() as verifier:
        slow_steps(verifier, STEP)
        async with met(verifier) as gateway:
            await until(lambda: gateway.pace.step_seconds >= STEP)
            assert [len(await ask(gateway, number)) for number in (1, 2)] == [1, 1]
            assert gateway.lost == 0


@pytest.mark.fault(5)
async def test_a_round_that_is_never_answered_is_given_up_after_eight_steps(running: Running) -> None:
    async with running() as verifier, met(verifier) as gateway:
        gateway.pace = pb.Pace(step_seconds=0.02)
        verifier.engine.submit = lambda task: None  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match=r"did not answer within 0\.16 s"):
            await ask(gateway, 1)
        assert not gateway.up


async def test_the_pace_tells_of_prompts_that_are_read(running: Running) -> None:
    async with running() as verifier, met(verifier) as gateway:
        await until(lambda: gateway.pace.prefilled == 12)
        assert 0 < gateway.pace.step_seconds == verifier.engine.pace.step_seconds


async def test_the_first_step_has_a_limit_as_well(running: Running) -> None:
    async with running() as verifier:
        pace = verifier.engine.pace
        assert 0 < pace.step_seconds < pace.expected("prompt", 512)
        assert limit(pace.expected("prompt", 512), 0) < float("inf")


async def test_a_long_step_does_not_stop_the_verifier_from_serving(running: Running) -> None:
    async with running(stuck_seconds=FLOOR) as verifier:
        verifier.engine.pace.observe("verify", 1, 2.0)
        slow_steps(verifier, 1.5)
        async with met(verifier) as gateway:
            assert await gateway._serves()
            assert len(await ask(gateway, 1)) == 1
            assert gateway.serving
