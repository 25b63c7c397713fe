"""What each peer may do: a draft subscribes and guesses by its own name, a gateway touches its own sequences."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import grpc
import pytest

from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import Follower, Verifier, prompt_of
from tests.verifier_service.serve.test_lifetimes import until

STRANGER = "a stranger"


async def refusal(call: object) -> tuple[grpc.StatusCode, str]:
    """How a call ends that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(call, 20)  # type: ignore[arg-type]
    return refused.value.code(), refused.value.details() or ""


async def ended(follower: Follower) -> bool:
    """A subscription that is refused ends at once."""
    try:
        await asyncio.wait_for(follower.code(), 0.2)
    except TimeoutError:
        return False
    return True


@pytest.mark.fault(36)
async def test_the_name_of_a_gateway_that_is_there_cannot_be_taken_over(verifier: Verifier) -> None:
    await verifier.client().start("a", prompt_of(9))
    for stream in (0, 1):
        thief = verifier.client("test", stream, caller=STRANGER)
        code, reason = await refusal(thief.start("b", prompt_of(9)))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "another process is gateway test now" in reason
    assert set(verifier.engine.sequences) == {"a"}
    again = verifier.client("test", 1)
    assert (await again.start("c", prompt_of(9))).status.code == codes.CODE_OK


async def test_a_gateway_s_name_is_its_own_until_its_lease_has_ended(running: Running) -> None:
    async with running(lease_seconds=0.5) as verifier:
        first = verifier.client()
        await first.start("a", prompt_of(9))
        await first.close()
        thief = verifier.client("test", 5, caller=STRANGER)
        assert (await refusal(thief.start("b", prompt_of(9))))[0] is grpc.StatusCode.PERMISSION_DENIED
        await until(lambda: not verifier.engine.sequences)
        heir = verifier.client("test", 0, caller=STRANGER)
        assert (await heir.start("c", prompt_of(9))).status.code == codes.CODE_OK


@pytest.mark.fault(36)
async def test_nobody_releases_what_is_another_gateway_s(verifier: Verifier) -> None:
    owner, other = verifier.client("owner"), verifier.client("other", caller=STRANGER)
    await owner.start("a", prompt_of(9))
    await other.start("b", prompt_of(9))
    assert await other.release("a", "b") == 1
    assert set(verifier.engine.sequences) == {"a"}
    other.name = owner.name
    code, _ = await refusal(other.release("a"))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    other.name = ("spire-other", "nobody")
    code, _ = await refusal(other.release("a"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert set(verifier.engine.sequences) == {"a"}
    assert await owner.release("a") == 1


async def test_nobody_verifies_or_starts_what_is_another_gateway_s(verifier: Verifier) -> None:
    owner, other = verifier.client("owner"), verifier.client("other", caller=STRANGER)
    await owner.start("a", prompt_of(9), draft_id="magicdec")
    await other.start("b", prompt_of(9))
    for k in (0, 2):
        (verified,) = await other.verify(pb.VerifyItem(sequence_id="a", round=1, base=9, k=k))
        assert verified.status.code == codes.CODE_NOT_FOUND
    again = await other.start("a", prompt_of(9))
    assert again.status.code == codes.CODE_INVALID_ARGUMENT
    assert not again.token
    (mine,) = await owner.verify(pb.VerifyItem(sequence_id="a", round=1, base=9))
    assert mine.status.code == codes.CODE_OK


async def test_a_batch_that_fails_lets_nothing_go_that_is_another_gateway_s(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = verifier.client("owner"), verifier.client("other", caller=STRANGER)
    await owner.start("a", prompt_of(9))
    await other.start("b", prompt_of(9))
    items = [pb.VerifyItem(sequence_id=name, round=1, base=9) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(verifier.engine._blocks, "_admissible", Mock(side_effect=RuntimeError("a bug")))
        assert codes.CODE_OK not in {result.status.code for result in await other.verify(*items)}
    assert set(verifier.engine.sequences) == {"a"}


@pytest.mark.fault(36)
async def test_the_name_of_a_draft_that_follows_cannot_be_taken_over(verifier: Verifier) -> None:
    follower = await verifier.follower("draft")
    with pytest.raises(grpc.aio.AioRpcError, match="another process is draft draft now"):
        await (await verifier.follower("draft", caller=STRANGER)).read()
    await verifier.client().start("a", prompt_of(9), draft_id="draft")
    while not follower.rows:
        await follower.read()


async def test_a_draft_that_has_gone_leaves_its_name_to_the_next(verifier: Verifier) -> None:
    gone = await verifier.follower("draft")
    await gone.close()
    heir = await verifier.follower("draft", caller=STRANGER)
    for _ in range(100):
        if not await ended(heir):
            break
        heir = await verifier.follower("draft", caller=STRANGER)
    await verifier.client().start("a", prompt_of(9), draft_id="draft")
    while not heir.rows:
        await heir.read()
