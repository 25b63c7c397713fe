"""What gateways are told of drafts: who there is, and whether it can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from spire.rpc.channel import PROTOCOL_VERSION
from spire.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import Client, Follower, Verifier, prompt_of
from tests.verifier_service.serve.test_lifetimes import until


def subscription(verifier: Verifier, **of_draft: Any) -> draft_pb2.Subscription:
    info = {"kind": "spire", "model_name": "small", "vocab_size": verifier.info.vocab_size}
    return draft_pb2.Subscription(
        draft_id="one",
        target_fingerprint=verifier.info.target_fingerprint,
        protocol_version=PROTOCOL_VERSION,
        tapped_layers=[0, 1],
        sink=1,
        window=8,
        draft=pb.DraftInfo(**info | of_draft),
    )


def follow(client: Client, request: draft_pb2.Subscription) -> grpc.aio.StreamStreamCall:
    """Subscribe; the stream stays open until it is cancelled."""

    async def messages() -> AsyncIterator[draft_pb2.DraftMessage]:
        yield draft_pb2.DraftMessage(subscription=request)
        await asyncio.Event().wait()

    return draft_pb2_grpc.DraftingStub(client.channel).Follow(messages())


async def told(client: Client) -> dict[str, bool]:
    """By draft id, whether it can be asked: the next thing that a gateway is told of drafts."""
    while not (response := await asyncio.wait_for(client._call.read(), 20)).HasField("drafts"):
        pass
    return {draft.draft_id: draft.available for draft in response.drafts.drafts}


async def test_a_draft_is_listed_and_askable_while_it_follows(verifier: Verifier) -> None:
    client = verifier.client()
    assert await told(client) == {"magicdec": True}
    following = follow(client, subscription(verifier))
    while (drafts := await told(client)) == {"magicdec": True}:
        pass
    assert drafts == {"magicdec": True, "one": True}
    following.cancel()
    while "one" in (drafts := await told(client)):
        pass
    assert drafts == {"magicdec": True}


@pytest.mark.fault(2)
async def test_a_draft_that_was_too_late_cannot_be_asked_until_it_has_answered(verifier: Verifier) -> None:
    client, draft = verifier.client(), Follower(verifier.address, verifier.info)
    draft.request.CopyFrom(subscription(verifier))
    await draft.subscribed()
    while not (await told(client)).get("one"):
        pass
    await client.start("a", prompt_of(9), draft_id="one")
    batch = pb.VerifyBatch(batch_id=1, items=[pb.VerifyItem(sequence_id="a", round=1, base=9, k=2)])
    batch.patience_seconds = 0.05
    await client.send(pb.RoundsRequest(verify=batch))
    assert (await told(client))["one"] is False
    await draft.reply(draft_pb2.DraftReply(batch_id=(await draft.asked()).batch_id))
    assert (await told(client))["one"] is True
    await draft.close()


async def test_however_fast_drafts_change_a_gateway_is_told_the_final_state(verifier: Verifier) -> None:
    client, drafts = verifier.client(), verifier.engine.draft_requests.drafts
    assert drafts
    with drafts.followed_by("one", pb.DraftInfo()):

        def change() -> None:
            for number in range(3001):
                drafts.may_be_asked("one", number % 2 == 0)

        seen: list[dict[str, bool]] = []

        async def read() -> None:
            while True:
                seen.append(await told(client))

        reading = asyncio.create_task(read())
        await asyncio.to_thread(change)
        drafts.may_be_asked("one", False)
        await until(lambda: seen and seen[-1] == {"magicdec": True, "one": False})
        reading.cancel()


@pytest.mark.fault(36)
async def test_no_draft_goes_by_the_target_s_own_name(verifier: Verifier) -> None:
    client, request = verifier.client(), subscription(verifier)
    request.draft_id = "magicdec"
    with pytest.raises(grpc.aio.AioRpcError, match="the target itself"):
        await follow(client, request).read()
    request.ClearField("draft")
    with pytest.raises(grpc.aio.AioRpcError, match="the target itself"):
        await follow(client, request).read()
    with pytest.raises(grpc.aio.AioRpcError, match="the target itself"):
        await follow(client, subscription(verifier, kind="magicdec")).read()
    assert await told(client) == {"magicdec": True}


async def test_gateways_are_told_what_a_draft_says_of_itself(verifier: Verifier) -> None:
    client = verifier.client()
    following = follow(client, subscription(verifier, max_speculation_depth=7, state_bytes_per_sequence=99))
    while True:
        response = await client._call.read()
        if len(response.drafts.drafts) == 2:
            break
    one = response.drafts.drafts[1]
    assert (one.kind, one.model_name, one.max_speculation_depth) == ("spire", "small", 7)
    assert one.state_bytes_per_sequence == 99
    following.cancel()


async def test_the_target_is_told_of_as_a_draft_of_its_own(running: Running) -> None:
    async with running(self_window=40, self_sink=2) as verifier:
        response = await verifier.client()._call.read()
        (itself,) = response.drafts.drafts
    assert (itself.kind, itself.window, itself.sink) == ("magicdec", 40, 2)
    assert itself.tokenizer_hash == verifier.info.tokenizer_hash
    assert itself.state_bytes_per_sequence == 0


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("said", "values"),
    [({"tokenizer_hash": "syllables"}, ["tokenizer", "'syllables'"]), ({"vocab_size": 7}, ["vocabulary", "7", "300"])],
)
async def test_a_draft_that_does_not_belong_is_refused_with_both_values(
    verifier: Verifier, said: dict[str, Any], values: list[str]
) -> None:
    client = verifier.client()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await follow(client, subscription(verifier, **said)).read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert all(value in (refused.value.details() or "") for value in values)
    assert await told(client) == {"magicdec": True}
