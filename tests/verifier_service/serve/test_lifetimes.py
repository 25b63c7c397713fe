"""Slots: taken by Start, freed by Release or by the lease of a gateway that stays away."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest
import torch

from spire.model.target import Target
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import Verifier, plain_greedy, prompt_of, slow_steps


async def until(condition: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_who_finds_no_slot_waits_until_a_release_frees_one(running: Running, target: Target) -> None:
    async with running(max_sequences=2) as verifier:
        client = verifier.client()
        for name in ("a", "b"):
            assert (await client.start(name, prompt_of(9))).status.code == codes.CODE_OK
        await client.send_start("c", prompt_of(30))
        await until(lambda: bool(verifier.engine.slots.waiting))
        assert await client.release("a") == 1
        started = (await client.read()).started
        assert client.stages["c"] == [pb.STAGE_WAITING, pb.STAGE_ADMITTED, pb.STAGE_COMPUTED]
        assert client.stages["b"] == [pb.STAGE_ADMITTED, pb.STAGE_COMPUTED]
        assert (started.sequence_id, [started.token]) == ("c", plain_greedy(target, prompt_of(30), 1))
        (gone,) = await client.verify(pb.VerifyItem(sequence_id="a", round=1, base=9))
        assert gone.status.code == codes.CODE_NOT_FOUND


@pytest.mark.fault(13)
async def test_release_while_prefilling_frees_the_slot(running: Running) -> None:
    async with running(token_budget=1, max_sequences=1) as verifier:
        slow_steps(verifier)
        client = verifier.client()
        await client.send_start("a", prompt_of(199))
        await until(lambda: verifier.engine.sequences)
        assert await client.release("a") == 1
        released = (await client.read()).started
        assert (released.sequence_id, released.status.code) == ("a", codes.CODE_NOT_FOUND)
        assert (await client.start("b", prompt_of(3))).sequence_id == "b"


async def test_a_start_that_comes_again_while_prefilling_is_answered_as_often(running: Running) -> None:
    async with running(token_budget=1) as verifier:
        slow_steps(verifier)
        client = verifier.client()
        for _ in range(2):
            await client.send_start("a", prompt_of(199))
        first, second = [(await client.read()).started for _ in range(2)]
        assert (first.status.code, second.status.code) == (codes.CODE_FAILED_PRECONDITION, codes.CODE_OK)
        assert second.base == 199


@pytest.mark.fault(22)
async def test_a_gateway_that_stays_away_loses_its_sequences(running: Running) -> None:
    async with running(lease_seconds=0.3) as verifier:
        gone, stays = verifier.client("gone"), verifier.client("stays")
        await gone.start("a", prompt_of(9))
        await stays.start("b", prompt_of(9))
        await gone.close()
        await until(lambda: verifier.engine.steps.cache.free_slots == 7)
        assert set(verifier.engine.sequences) == {"b"}


async def test_a_gateway_that_returns_in_time_keeps_its_sequences(running: Running) -> None:
    async with running(lease_seconds=3) as verifier:
        first = verifier.client("gateway")
        started = await first.start("a", prompt_of(9))
        await first.close()
        second = verifier.client("gateway")
        assert await second.start("a", prompt_of(9)) == started
        await asyncio.sleep(3.5)
        (result,) = await second.verify(pb.VerifyItem(sequence_id="a", round=1, base=9))
        assert result.status.code == codes.CODE_OK


@pytest.mark.fault(9)
async def test_a_block_repeated_over_another_connection_is_not_drawn_again(running: Running) -> None:
    async with running(lease_seconds=5) as verifier:
        sampling = codes.Sampling(temperature=1, top_p=1, seed=5)
        first = verifier.client("gateway", stream=0)
        started = await first.start("a", prompt_of(9), sampling)
        block = pb.VerifyItem(sequence_id="a", round=1, base=started.base)
        answer = await first.verify(block)
        generated = verifier.engine.metrics.tokens._value.get()
        await first.close()
        assert await verifier.client("gateway", stream=1).verify(block) == answer
        assert verifier.engine.metrics.tokens._value.get() == generated


@pytest.mark.fault(7)
async def test_an_older_stream_of_a_gateway_starts_nothing_more(verifier: Verifier) -> None:
    """What a healed partition lets go late would take a slot that nobody ever releases."""
    older, stranger = verifier.client("gateway", stream=3), verifier.client("another", stream=1)
    await older.start("before", prompt_of(9))
    newer = verifier.client("gateway", stream=4)
    await newer.start("a", prompt_of(9))
    for late in (older, verifier.client("gateway", stream=3)):
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await late.start("late", prompt_of(9))
        assert await late.code() == grpc.StatusCode.FAILED_PRECONDITION
    await stranger.start("b", prompt_of(9))
    await newer.start("c", prompt_of(9))
    assert set(verifier.engine.slots.sequences) == {"before", "a", "b", "c"}


async def test_decoding_goes_on_between_the_chunks_of_a_long_prompt(running: Running) -> None:
    """With a budget of one token a prompt of 199 takes 199 chunks; rounds of another sequence pass in between."""
    async with running(token_budget=1) as verifier:
        slow_steps(verifier)
        client, other = verifier.client(), verifier.client("other")
        started = await client.start("a", prompt_of(2))
        await other.send_start("long", prompt_of(199))
        await until(lambda: "long" in verifier.engine.sequences)
        for round_ in range(1, 6):
            await client.verify(pb.VerifyItem(sequence_id="a", round=round_, base=started.base + round_ - 1))
        assert verifier.engine.sequences["long"].started is None
        (early,) = await other.verify(pb.VerifyItem(sequence_id="long", round=1, base=199))
        assert early.status.code == codes.CODE_FAILED_PRECONDITION
        assert (await other.read()).started.base == 199


@pytest.mark.fault(11)
async def test_numbers_that_are_not_finite_fail_their_sequence_only(verifier: Verifier, target: Target) -> None:
    """The cache of one sequence is damaged: its mates decode on, and its slot is clean for the next one."""
    client, prompt = verifier.client(), prompt_of(9)
    damaged = await client.start("damaged", prompt)
    await client.start("mate", prompt)
    slot = verifier.engine.sequences["damaged"].slot
    verifier.engine.steps.cache.values[0].tensor[slot, :, 0] = float("nan")
    items = [pb.VerifyItem(sequence_id=name, round=1, base=damaged.base) for name in ("damaged", "mate")]
    generated = verifier.engine.metrics.tokens._value.get()
    bad, good = await client.verify(*items)
    assert (bad.status.code, good.status.code) == (codes.CODE_DATA_LOSS, codes.CODE_OK)
    assert verifier.engine.metrics.tokens._value.get() == generated + 1
    assert list(good.tokens) == plain_greedy(target, prompt, 2)[1:]
    await client.release("damaged")
    again = await client.start("again", prompt_of(40))
    assert verifier.engine.sequences["again"].slot == slot
    assert [again.token] == plain_greedy(target, prompt_of(40), 1)


async def test_a_failing_step_is_answered_and_its_sequences_can_start_again(verifier: Verifier, target: Target) -> None:
    client, prompt = verifier.client(), prompt_of(9)
    started = await client.start("a", prompt)
    await client.start("bystander", prompt)
    norm = verifier.engine.steps.target.norm
    kept, norm.weight = norm.weight, torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    (failed,) = await client.verify(pb.VerifyItem(sequence_id="a", round=1, base=started.base))
    unstarted = await client.start("b", prompt)
    norm.weight = kept
    assert failed.status.code == unstarted.status.code == codes.CODE_NOT_FOUND
    assert "shape" not in failed.status.message + unstarted.status.message, "torch's own words"
    assert set(verifier.engine.sequences) == {"bystander"}
    assert [(await client.start(name, prompt)).token for name in "ab"] == plain_greedy(target, prompt, 1) * 2


async def test_a_batch_that_cannot_be_taken_is_answered_and_the_engine_lives_on(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(slots: object, new_tokens: object) -> bool:
        raise RuntimeError("out of memory")

    client = verifier.client()
    started = await client.start("a", prompt_of(9))
    block, unknown = (pb.VerifyItem(sequence_id=name, round=1, base=started.base) for name in ("a", "nobody"))
    with monkeypatch.context() as patch:
        patch.setattr(verifier.engine.steps.cache, "reserve", refuse)
        failed, refused = await client.verify(block, unknown)
    assert [failed.status.code, refused.status.code] == [codes.CODE_NOT_FOUND] * 2
    assert "out of memory" not in failed.status.message
    assert (await client.start("a", prompt_of(9))).token == started.token


@pytest.mark.fault(5)
async def test_the_watchdog_sees_what_is_done_between_two_steps(verifier: Verifier) -> None:
    go_on = threading.Event()
    done = verifier.engine.call(go_on.wait, 10)
    await until(lambda: verifier.engine.pace.seconds_busy > 0.1)
    go_on.set()
    assert await asyncio.wrap_future(done)
    await until(lambda: verifier.engine.pace.seconds_busy == 0)


async def test_calls_without_end_keep_no_step_from_running(verifier: Verifier) -> None:
    client, enough = verifier.client(), threading.Event()
    started = await client.start("a", prompt_of(9))

    def again() -> None:
        if not enough.is_set():
            verifier.engine.call(again)

    verifier.engine.call(again)
    try:
        (result,) = await client.verify(pb.VerifyItem(sequence_id="a", round=1, base=started.base))
    finally:
        enough.set()
    assert result.status.code == codes.CODE_OK


async def test_an_idle_engine_sleeps(verifier: Verifier) -> None:
    client = verifier.client()
    await client.start("a", prompt_of(9))
    used = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - used < 0.25
