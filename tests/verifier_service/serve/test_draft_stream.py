"""A draft's stream: what begins it and ends it, and when a draft that answers late keeps it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from spire.rpc.channel import connect
from spire.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2 as pb
from tests.verifier_service.engine.test_draft_requests import block, drafting, order, proposal, result
from tests.verifier_service.harness import GREEDY, Verifier, prompt_of
from verifier_service.engine import draft_requests
from verifier_service.serve import draft_connections


@pytest.mark.fault(12)
async def test_a_draft_whose_reply_is_lost_is_asked_again_once_it_connects_again(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips in a request's id: the reply is to another request, and the verifier would wait for ever."""
    monkeypatch.setattr(draft_requests, "_MOST_OWED_SECONDS", 0.5)
    client = verifier.client()
    async with drafting(verifier) as draft:
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await order(client, block("a", 1, k=2), patience=0.3)
        asked = await draft.asked()
        asked.batch_id ^= 1 << 20
        await draft.guess(asked, proposal("a", [1, 2]))
        assert (await result(client)).undrafted == pb.UNDRAFTED_LATE
        with pytest.raises(AssertionError, match="the stream has ended"):
            await draft.asked()
    async with drafting(verifier) as draft:
        await order(client, block("a", 2, k=1))
        await draft.guess(await draft.asked(), proposal("a", [1]))
        assert (await result(client)).drafted == 1


@pytest.mark.fault(2)
async def test_a_draft_that_says_it_is_working_keeps_its_stream(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that absorbs a long prompt: on a new stream it would begin anew, and never be done."""
    monkeypatch.setattr(draft_requests, "_MOST_OWED_SECONDS", 1.0)
    client = verifier.client()
    async with drafting(verifier) as draft:
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await order(client, block("a", 1, k=2), patience=0.1)
        asked = await draft.asked()
        assert (await result(client)).undrafted == pb.UNDRAFTED_LATE
        for _ in range(10):
            await draft.write(draft_pb2.DraftMessage(working=draft_pb2.Working()))
            await asyncio.sleep(0.25)
        await draft.guess(asked, proposal("a", [1, 2]))
        await order(client, block("a", 2, k=1))
        await draft.guess(await draft.asked(), proposal("a", [1]))
        assert (await result(client)).drafted == 1


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([draft_pb2.DraftMessage(reply=draft_pb2.DraftReply(batch_id=1))], "first message is its subscription"),
        ([draft_pb2.DraftMessage()], "first message is its subscription"),
        ([], "first message is its subscription"),
        ([draft_pb2.DraftMessage(subscription=draft_pb2.Subscription())], "speaks protocol 0"),
    ],
    ids=["a reply", "an empty message", "nothing", "an empty subscription"],
)
async def test_a_stream_that_begins_without_a_subscription_is_refused(
    verifier: Verifier, messages: list[draft_pb2.DraftMessage], says: str
) -> None:
    async with connect(verifier.address) as channel:
        call = draft_pb2_grpc.DraftingStub(channel).Follow()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        assert await call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        assert says in await call.details()


async def test_a_stream_on_which_no_subscription_comes_is_refused(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_connections, "_SUBSCRIPTION_SECONDS", 0.3)
    async with connect(verifier.address) as channel:
        call = draft_pb2_grpc.DraftingStub(channel).Follow()
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.INVALID_ARGUMENT
        assert "no subscription came within 0.3 s" in await call.details()


@pytest.mark.parametrize(
    "message",
    [draft_pb2.DraftMessage(), draft_pb2.DraftMessage(subscription=draft_pb2.Subscription(draft_id="draft"))],
    ids=["empty", "a second subscription"],
)
async def test_a_message_that_is_neither_reply_nor_resync_ends_the_stream(
    verifier: Verifier, message: draft_pb2.DraftMessage
) -> None:
    async with drafting(verifier) as draft:
        await draft.write(message)
        assert await draft.code() is grpc.StatusCode.INVALID_ARGUMENT
