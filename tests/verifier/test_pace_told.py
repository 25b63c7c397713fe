"""The verifier tells its pace, and a gateway waits as long as that asks for: no longer, no less."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.peers import PeerTooLate
from spire.pace import limit
from spire.v1 import verifier_pb2 as pb
from tests.verifier.conftest import Running
from tests.verifier.harness import slow_steps
from tests.verifier.test_gateway_line import Near, met, until

# Seconds that a gateway waits at least, and that a step takes.
FLOOR, STEP = 0.05, 0.4


async def ask(gateway: Near, number: int) -> list[int]:
    request = pb.RoundsRequest()
    request.verify.items.add(sequence_id="a", round=number)
    return await gateway.tokens(await gateway.ask(request, FLOOR))


@pytest.mark.fault(33)
async def test_a_round_is_waited_for_as_long_as_the_verifiers_steps_take(running: Running, tmp_path: Path) -> None:
    async with running() as verifier:
        slow_steps(verifier, STEP)
        async with met(verifier, tmp_path) as gateway:
            await until(lambda: gateway.pace.step_seconds >= STEP)
            assert [len(await ask(gateway, number)) for number in (1, 2)] == [1, 1]
            assert gateway.lost == 0


@pytest.mark.fault(5)
async def test_a_round_that_is_never_answered_is_given_up_after_eight_steps(running: Running, tmp_path: Path) -> None:
    async with running() as verifier, met(verifier, tmp_path) as gateway:
        gateway.pace = pb.Pace(step_seconds=0.02)
        verifier.engine.submit = lambda task: None  # type: ignore[method-assign]
        with pytest.raises(PeerTooLate, match=r"did not answer within 0\.16 s"):
            await ask(gateway, 1)
        assert not gateway.up


async def test_the_pace_tells_of_prompts_that_are_read(running: Running, tmp_path: Path) -> None:
    async with running() as verifier, met(verifier, tmp_path) as gateway:
        await until(lambda: gateway.pace.prefilled == 12)
        assert 0 < gateway.pace.step_seconds == verifier.engine.pace.step_seconds


async def test_the_first_step_has_a_limit_as_well(running: Running) -> None:
    async with running() as verifier:
        pace = verifier.engine.pace
        assert 0 < pace.step_seconds < pace.expected("prompt", 512)
        assert limit(pace.expected("prompt", 512), 0) < float("inf")


async def test_a_long_step_does_not_stop_the_verifier_from_serving(running: Running, tmp_path: Path) -> None:
    async with running(stuck_seconds=FLOOR) as verifier:
        verifier.engine.pace.observe("verify", 1, 2.0)
        slow_steps(verifier, 1.5)
        async with met(verifier, tmp_path) as gateway:
            assert await gateway._serves()
            assert len(await ask(gateway, 1)) == 1
            assert gateway.serving
