"""What a peer may ask for at once: more is refused with the limit, and nobody else notices."""

from __future__ import annotations

import grpc
import pytest

from spire.rpc.limits import MAX_ALLOWED_TOKENS, MAX_END_TOKENS, MAX_FOLLOWERS, MAX_LOGIT_BIASES, MAX_NAMED
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.harness import GREEDY, Client, Verifier, prompt_of
from tests.verifier_service.serve.test_lifetimes import until

TOO_MANY = [str(number) for number in range(MAX_NAMED + 1)]


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("adjustments", "says"),
    [
        (pb.Adjustments(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)), f"at most {MAX_LOGIT_BIASES}"),
        (pb.Adjustments(allowed_tokens=[5] * (MAX_ALLOWED_TOKENS + 1)), f"at most {MAX_ALLOWED_TOKENS}"),
        (pb.Adjustments(end_tokens=[5] * (MAX_END_TOKENS + 1)), f"at most {MAX_END_TOKENS}"),
    ],
)
async def test_a_start_with_too_much_is_refused_and_its_mate_is_served(
    verifier: Verifier, adjustments: pb.Adjustments, says: str
) -> None:
    client = verifier.client()
    start = pb.Start(sequence_id="a", tokens=prompt_of(5), sampling=GREEDY, adjustments=adjustments)
    await client.send(pb.RoundsRequest(start=start))
    await client.send_start("mate", prompt_of(5))
    refused, mate = sorted([(await client.read()).started for _ in range(2)], key=lambda s: s.sequence_id)
    assert (refused.status.code, mate.status.code) == (codes.CODE_INVALID_ARGUMENT, codes.CODE_OK)
    assert says in refused.status.message


@pytest.mark.fault(17)
async def test_a_block_of_too_many_items_ends_its_stream_and_no_other(verifier: Verifier) -> None:
    client, mate = verifier.client(), verifier.client("another")
    started = await mate.start("mate", prompt_of(5))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.verify(*(pb.VerifyItem(sequence_id=name) for name in TOO_MANY))
    assert_says_the_limit(refused.value)
    await assert_decodes(mate, started)


async def release(verifier: Verifier) -> None:
    await verifier.client().release("mate", *TOO_MANY)


async def resync(verifier: Verifier) -> None:
    follower = await verifier.follower()
    await follower.resync(*TOO_MANY)
    await follower.read()


CALLS = {"Release": release, "Resync": resync}


@pytest.mark.fault(17)
@pytest.mark.parametrize("call", sorted(CALLS))
async def test_calls_that_name_too_many_sequences_are_refused(verifier: Verifier, call: str) -> None:
    mate = verifier.client()
    started = await mate.start("mate", prompt_of(5))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await CALLS[call](verifier)
    assert_says_the_limit(refused.value)
    await assert_decodes(mate, started)


@pytest.mark.fault(17)
async def test_so_many_drafts_follow_and_no_more(verifier: Verifier) -> None:
    followers = [await verifier.follower(f"draft {number}") for number in range(MAX_FOLLOWERS)]
    again = await verifier.follower("draft 0")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (await verifier.follower("one more")).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{MAX_FOLLOWERS} drafts" in (refused.value.details() or "")
    await followers[-1].close()

    def feeds() -> int:
        return sum(feed.deliver is not None for feed in verifier.engine.publisher.feeds.values())

    await until(lambda: feeds() == MAX_FOLLOWERS - 1)
    await verifier.follower("one more")
    assert feeds() == MAX_FOLLOWERS
    await again.close()


async def assert_decodes(client: Client, started: pb.Started) -> None:
    (result,) = await client.verify(pb.VerifyItem(sequence_id="mate", round=1, base=started.base))
    assert result.status.code == codes.CODE_OK


def assert_says_the_limit(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"at most {MAX_NAMED}" in (error.details() or "")
