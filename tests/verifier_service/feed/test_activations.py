"""Activations: what a draft holds after any history is what the target computes over the whole sequence."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from spire.model.target import Target
from spire.rpc.carrier import Ring
from spire.v1 import draft_pb2, tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import GREEDY, Client, Follower, Verifier, plain_greedy, prompt_of, whole_taps
from verifier_service.feed.delivery import Deliver, Delivery, Picked, frames
from verifier_service.feed.subscriber import MAX_FRAME_BYTES, Subscriber
from verifier_service.serve.draft_connections import MAX_RING_BYTES

pytestmark = pytest.mark.usefixtures("each_backend")

WINDOW, SINK = 8, 1


async def begin(client: Client, name: str, length: int, draft_id: str = "draft") -> pb.Started:
    started = await client.start(name, prompt_of(length), draft_id=draft_id)
    assert started.status.code == codes.CODE_OK
    return started


async def rounds(client: Client, target: Target, name: str, length: int, depths: list[tuple[int, int]]) -> list[int]:
    """Greedy rounds with (right, wrong) draft tokens each. Returns all committed tokens."""
    wanted = plain_greedy(target, prompt_of(length), 60)
    done = 1
    for round_, (right, wrong) in enumerate(depths, 1):
        draft = [*wanted[done : done + right], *([(wanted[done + right] + 1) % 300] * wrong)]
        block = pb.VerifyItem(sequence_id=name, round=round_, base=length + done - 1, draft_tokens=draft)
        (result,) = await client.verify(block)
        assert result.accepted == right
        done += right + 1
    return [*prompt_of(length), *wanted[: done - 1]]


async def assert_holds(follower: Follower, target: Target, name: str, tokens: list[int], positions: set[int]) -> None:
    """Read until the last position has arrived; then compare every row with a forward over the whole sequence."""
    while len(tokens) - 1 not in follower.rows.get(name, {}):
        await follower.read()
    assert set(follower.rows[name]) == positions
    expected = whole_taps(target, tokens, follower.layers)
    for position, row in follower.rows[name].items():
        torch.testing.assert_close(row, expected[position], atol=1e-4, rtol=1e-4)


def kept(length: int) -> set[int]:
    return {*range(min(SINK, length)), *range(max(0, length - WINDOW), length)}


async def plain_rounds(client: Client, sequences: list[str], number: int, base: int, quiet: list[bool]) -> None:
    """A plain round of each, whose `base` is common."""
    pairs = zip(sequences, quiet, strict=True)
    items = [pb.VerifyItem(sequence_id=name, round=number, base=base, paused=hushed) for name, hushed in pairs]
    assert all(len(result.tokens) == 1 for result in await client.verify(*items))


@pytest.mark.parametrize(("quiet", "resets"), [(1, False), (WINDOW - 1, False), (WINDOW, True), (30, True)])
async def test_what_was_quiet_is_sent_with_the_first_block_that_is_not(
    verifier: Verifier, target: Target, quiet: int, resets: bool
) -> None:
    follower, client = await verifier.follower(), verifier.client()
    await begin(client, "a", 20)
    await begin(client, "mate", 20)
    for number in range(1, quiet + 2):
        await plain_rounds(client, ["a", "mate"], number, 19 + number, [number <= quiet, False])
    end = 20 + quiet + 1
    tokens = [*prompt_of(20), *plain_greedy(target, prompt_of(20), end - 20)]
    while end - 1 not in follower.rows.get("a", {}):
        await follower.read()
    assert set(follower.rows["mate"]) == kept(20) | {*range(20, end)}, "nobody else is held back"
    spans = [span for packet in follower.packets for span in packet.spans if span.sequence_id == "a"]
    replays_of_prompt = 1
    assert sum(span.reset for span in spans) == replays_of_prompt + resets
    await assert_holds(follower, target, "a", tokens[:end], kept(end) if resets else kept(20) | {*range(20, end)})


async def test_a_draft_reconnecting_while_idle_is_sent_everything_once(verifier: Verifier, target: Target) -> None:
    client = verifier.client()
    await verifier.follower()
    await begin(client, "a", 20)
    await plain_rounds(client, ["a"], 1, 20, [True])
    follower = await verifier.follower()
    await plain_rounds(client, ["a"], 2, 21, [False])
    tokens = [*prompt_of(20), *plain_greedy(target, prompt_of(20), 2)]
    await assert_holds(follower, target, "a", tokens, kept(21) | {21})


@pytest.mark.parametrize("rounds_paused", [0, 2, 30])
async def test_a_start_that_is_paused_is_sent_with_the_first_block_that_is_not(
    verifier: Verifier, target: Target, rounds_paused: int
) -> None:
    follower, client = await verifier.follower(), verifier.client()
    start = pb.Start(sequence_id="a", tokens=prompt_of(20), sampling=GREEDY, draft_id="draft", paused=True)
    await client.send(pb.RoundsRequest(start=start))
    await client.read()
    await begin(client, "mate", 20)
    for number in range(1, rounds_paused + 2):
        await plain_rounds(client, ["a", "mate"], number, 19 + number, [number <= rounds_paused, False])
        if number <= rounds_paused:
            while 19 + number not in follower.rows.get("mate", {}):
                await follower.read()
            assert "a" not in follower.rows
    end = 20 + rounds_paused + 1
    tokens = [*prompt_of(20), *plain_greedy(target, prompt_of(20), end - 20)]
    await assert_holds(follower, target, "a", tokens[:end], kept(end))


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 60])
async def test_the_first_frame_is_the_sink_and_the_window(verifier: Verifier, target: Target, length: int) -> None:
    follower, client = await verifier.follower(), verifier.client()
    await begin(client, "a", length)
    await assert_holds(follower, target, "a", prompt_of(length), kept(length))
    assert [span.reset for span in follower.packets[0].spans] == [True, False][: len(follower.packets[0].spans)]


async def test_accepted_positions_follow_and_rejected_ones_never_do(verifier: Verifier, target: Target) -> None:
    follower, client = await verifier.follower(), verifier.client()
    await begin(client, "a", 20)
    tokens = await rounds(client, target, "a", 20, [(0, 0), (2, 3), (0, 4), (4, 0)])
    assert len(tokens) == 20 + 1 + 3 + 1 + 5
    await assert_holds(follower, target, "a", tokens, kept(20) | set(range(20, 30)))


async def test_one_step_is_one_message_for_all_sequences_of_a_draft(verifier: Verifier) -> None:
    follower, client = await verifier.follower(), verifier.client()
    for name, length in (("a", 5), ("b", 30), ("c", 9)):
        await begin(client, name, length)
        await follower.read()
    items = [pb.VerifyItem(sequence_id=n, round=1, base=base) for n, base in (("c", 9), ("a", 5), ("b", 30))]
    await client.verify(*items)
    message = await follower.read()
    assert sorted((span.sequence_id, span.start, span.count) for span in message.spans) == [
        ("a", 5, 1),
        ("b", 30, 1),
        ("c", 9, 1),
    ]
    assert list(message.rows.shape) == [3, 2, 32]


async def test_chunked_prefill_equals_whole_prefill(running: Running, target: Target) -> None:
    """Chunks of 16 shared by several prompts: first tokens and activations are those of the whole prompt."""
    async with running(token_budget=16) as verifier:
        follower, client = await verifier.follower(), verifier.client()
        lengths = {"a": 100, "b": 7, "c": 33, "d": 4}
        for name, length in lengths.items():
            await client.send_start(name, prompt_of(length), draft_id="draft")
        for _ in lengths:
            started = (await client.read()).started
            prompt = prompt_of(lengths[started.sequence_id])
            assert [started.token] == plain_greedy(target, prompt, 1)
        for name, length in lengths.items():
            await assert_holds(follower, target, name, prompt_of(length), kept(length))


async def test_a_returning_draft_is_replayed(verifier: Verifier, target: Target) -> None:
    first, client = await verifier.follower(), verifier.client()
    await begin(client, "a", 20)
    await begin(client, "b", 3)
    await first.close()
    tokens = await rounds(client, target, "a", 20, [(2, 1), (0, 1), (3, 0)])
    second = await verifier.follower()
    await assert_holds(second, target, "a", tokens, kept(len(tokens)))
    await assert_holds(second, target, "b", prompt_of(3), kept(3))


async def test_a_newer_subscription_ends_the_older(verifier: Verifier, target: Target) -> None:
    first, client = await verifier.follower(), verifier.client()
    await begin(client, "a", 20)
    await first.read()
    second = await verifier.follower()
    await assert_holds(second, target, "a", prompt_of(20), kept(20))
    with pytest.raises(AssertionError, match="has ended"):
        await first.read()


async def test_a_resync_replays_what_is_held_and_passes_over_the_rest(verifier: Verifier, target: Target) -> None:
    follower, client = await verifier.follower(), verifier.client()
    await begin(client, "a", 20)
    await follower.read()
    follower.rows.clear()
    await follower.resync("a", "nobody")
    await assert_holds(follower, target, "a", prompt_of(20), kept(20))
    assert set(follower.rows) == {"a"}


async def test_each_draft_gets_its_own_sequences_and_layers(verifier: Verifier, target: Target) -> None:
    mine, other, client = await verifier.follower("mine"), await verifier.follower("other"), verifier.client()
    await begin(client, "a", 20, "mine")
    await begin(client, "b", 12, "other")
    await begin(client, "c", 12, "")
    tokens = await rounds(client, target, "a", 20, [(1, 1)])
    await assert_holds(mine, target, "a", tokens, kept(20) | {20, 21})
    await assert_holds(other, target, "b", prompt_of(12), kept(12))
    assert (set(mine.rows), set(other.rows)) == ({"a"}, {"b"})


async def test_a_draft_is_told_which_sequences_ended(verifier: Verifier) -> None:
    follower, client = await verifier.follower(), verifier.client()
    await begin(client, "a", 20)
    await begin(client, "b", 20)
    assert await client.release("a", "nobody") == 1
    while not follower.ended:
        await follower.read()
    assert follower.ended == ["a"]


async def test_rows_that_find_the_ring_full_come_inline_and_none_is_missing(
    running: Running, target: Target, tmp_path: Path
) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        follower, client = await verifier.follower(shared_memory=tmp_path), verifier.client()
        await begin(client, "a", 20)
        tokens = await rounds(client, target, "a", 20, [(4, 0)] * 11)
        await begin(client, "b", 60)
        await begin(client, "c", 9)
        await assert_holds(follower, target, "a", tokens, kept(20) | set(range(20, 75)))
        await assert_holds(follower, target, "b", prompt_of(60), kept(60))
        await assert_holds(follower, target, "c", prompt_of(9), kept(9))
        inline = [bool(packet.rows.data) for packet in follower.packets if packet.spans]
        assert inline[0] is False
        assert inline[-1] is True
        assert all(packet.rows.data == b"" for packet in follower.packets if packet.slice.length)
        assert follower.ring is not None
        follower.ring.release(follower.packets[-1].slice)
        await begin(client, "d", 9)
        await assert_holds(follower, target, "d", prompt_of(9), kept(9))
        assert follower.packets[-1].slice.length


async def test_a_draft_of_another_host_is_offered_no_memory(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        follower = Follower(verifier.address, verifier.info)
        follower.request.host = "another host's boot id"
        await follower.subscribed()
        first = await follower.read()
        assert first.HasField("ring")
        assert not first.ring.name
        await follower.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target_fingerprint": "ffff"}, "ffff"),
        ({"protocol_version": 99}, "99"),
        ({"tapped_layers": [3]}, "tapped layer 3"),
        ({"tapped_layers": []}, "either tapped layers or tokens"),
        ({"tokens": True}, "either tapped layers or tokens"),
        ({"window": 0}, "window"),
    ],
)
async def test_a_draft_of_another_kind_is_refused(verifier: Verifier, change: dict[str, object], said: str) -> None:
    follower = Follower(verifier.address, verifier.info)
    for name, value in change.items():
        follower.request.ClearField(name)  # type: ignore[arg-type]
        follower.request.MergeFrom(draft_pb2.Subscription(**{name: value}))  # type: ignore[arg-type]
    await follower.subscribed()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await follower.read()
    await follower.close()
    assert said in str(caught.value.details())
    if "target_fingerprint" in change:
        assert verifier.info.target_fingerprint in str(caught.value.details()), "both values are named"


def test_frames_hold_at_most_what_they_may() -> None:
    rows_RND = torch.randn(3000, 2, 256)
    spans = [draft_pb2.ActivationSpan(sequence_id="a", start=4, count=2500, reset=True)]
    spans.append(draft_pb2.ActivationSpan(sequence_id="b", start=0, count=500, reset=True))
    found = list(frames(Delivery(spans, Picked(rows_RND)), MAX_FRAME_BYTES))
    assert all(part.rows.nbytes <= MAX_FRAME_BYTES for part in found)
    assert torch.equal(torch.cat([part.rows.rows_RND for part in found]), rows_RND)
    pieces = [span for part in found for span in part.spans]
    for name, start, count in (("a", 4, 2500), ("b", 0, 500)):
        mine = [span for span in pieces if span.sequence_id == name]
        assert [span.reset for span in mine] == [True] + [False] * (len(mine) - 1)
        assert [p for s in mine for p in range(s.start, s.start + s.count)] == list(range(start, start + count))


async def test_an_8b_round_of_64_sequences_is_one_message_in_shared_memory(tmp_path: Path) -> None:
    """In two the draft waits for the first one's rows before it may look at the second's."""
    ring = Ring(tmp_path, MAX_RING_BYTES)
    subscriber = Subscriber(asyncio.get_running_loop(), lambda replay: None, ring)
    spans = [draft_pb2.ActivationSpan(sequence_id="all", count=220)]
    subscriber.deliver(Delivery(spans, Picked(torch.zeros(220, 8, 4096, dtype=torch.bfloat16))))
    await asyncio.sleep(0)
    sent = await anext(subscriber.packets())
    assert (sent.spans[0].count, sent.slice.length) == (220, 220 * 8 * 4096 * 2)


async def test_a_slow_subscriber_loses_its_queue_and_asks_for_a_replay() -> None:
    """It is never delivered a gap: after an overflow comes nothing but the replay and what follows it."""
    asked: list[Deliver] = []
    subscriber = Subscriber(asyncio.get_running_loop(), asked.append, max_bytes=100)

    def rows(*names: str) -> Delivery:
        spans = [draft_pb2.ActivationSpan(sequence_id=name, count=1) for name in names]
        return Delivery(spans, Picked(torch.zeros(len(names), 1, 15)))

    subscriber.deliver(rows("1", "2"))
    subscriber.deliver(Delivery(ended=["x"]))
    subscriber.deliver(rows("3"))
    subscriber.request(draft_pb2.DraftRequest(batch_id=7))
    subscriber.deliver(Delivery(ended=["y"]))
    await asyncio.sleep(0)
    packets = subscriber.packets()
    first = await anext(packets)
    assert (first.request.batch_id, len(first.spans)) == (7, 0), "the engine waits for the reply to a request"
    waiting = asyncio.ensure_future(anext(packets))
    await asyncio.sleep(0)
    assert asked == [subscriber.deliver]
    assert not waiting.done()
    subscriber.deliver(replace(rows("replay 1", "replay 2"), whole_replay=True))
    subscriber.deliver(Delivery())
    assert list((await waiting).ended) == ["x", "y"]
    assert [span.sequence_id for span in (await anext(packets)).spans] == ["replay 1", "replay 2"]


async def test_a_request_comes_in_one_packet_with_the_activations_before_it() -> None:
    subscriber = Subscriber(asyncio.get_running_loop(), lambda replay: None)
    packets, reused = subscriber.packets(), draft_pb2.DraftRequest()
    for number, name in enumerate("abc"):
        spans = [draft_pb2.ActivationSpan(sequence_id=name, count=1)]
        subscriber.deliver(Delivery(spans, Picked(torch.full((1, 1, 1), float(number)))))
        reused.batch_id = number
        subscriber.request(reused)
    reused.batch_id = 99
    await asyncio.sleep(0)
    seen = [await anext(packets) for _ in range(3)]
    assert [(packet.spans[0].sequence_id, packet.request.batch_id) for packet in seen] == [("a", 0), ("b", 1), ("c", 2)]
    subscriber.request(None)
    await asyncio.sleep(0)
    with pytest.raises(StopAsyncIteration):
        await anext(packets)
