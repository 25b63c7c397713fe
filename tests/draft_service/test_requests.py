"""What the verifier asks of a draft: it is drafted alike wherever q lies, and asked again when a stream breaks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from draft_service import follower
from spire.rpc.carrier import INLINE, SHARED_MEMORY
from spire.v1 import draft_pb2, tensor_pb2, verifier_pb2 as pb
from tests.draft_service.conftest import eventually
from tests.draft_service.harness import GREEDY, SAMPLED, Following, following

DEPTH = 3


def texts(results: list[pb.VerifyResult]) -> list[tuple[int, list[int]]]:
    return [(result.drafted, list(result.tokens)) for result in results]


def carriers(both: Following) -> set[str]:
    """By which activations came."""
    return {carrier for carrier, count in both.follower.bytes_received.items() if count}


@pytest.mark.parametrize(
    ("sampling", "top_m"),
    [
        pytest.param(SAMPLED, None, id="judged by q"),
        pytest.param(SAMPLED, 8, id="judged by q over candidates"),
        pytest.param(tensor_pb2.Sampling(top_p=1), None, id="greedy"),
        pytest.param(tensor_pb2.Sampling(temperature=1, top_p=1, rule=tensor_pb2.RULE_INVARIANT), None, id="invariant"),
    ],
)
async def test_in_shared_memory_rows_and_q_are_what_they_are_inline(
    pair: tuple[Path, Path], tmp_path: Path, sampling: tensor_pb2.Sampling, top_m: int | None
) -> None:
    found = []
    for shared, carrier in ((str(tmp_path), SHARED_MEMORY), ("", INLINE)):
        async with following(pair, shared, top_m) as both:
            await both.start("a", [1, 2, 3, 4, 5], sampling)
            found.append(await both.decode("a", 10, DEPTH))
            assert carriers(both) == {carrier}
    assert texts(found[0]) == texts(found[1])
    assert {result.drafted for result in found[0]} == {DEPTH}
    assert sum(result.accepted for result in found[0]) > 0


@pytest.mark.parametrize("top_m", [None, 8], ids=["whole vocabulary", "candidates"])
async def test_one_reply_for_all_items_names_q_in_the_ring(
    pair: tuple[Path, Path], tmp_path: Path, top_m: int | None
) -> None:
    async with following(pair, tmp_path, top_m) as both:
        for name, sampling in {"a": SAMPLED, "b": GREEDY}.items():
            await both.start(name, [1, 2, 3, 4, 5], sampling)
        made, replies = both.requests.replies.to, list[draft_pb2.DraftReply]()
        both.requests.replies.to = lambda *given: replies.append(made(*given)) or replies[-1]  # type: ignore[func-returns-value,method-assign]
        items = [pb.VerifyItem(sequence_id=name, round=1, k=DEPTH) for name in "ab"]
        await both.client.send(pb.RoundsRequest(verify=pb.VerifyBatch(batch_id=1, items=items, patience_seconds=10)))
        results = (await both.client.read()).verified.results
    assert [result.drafted for result in results] == [DEPTH, DEPTH]
    (reply,) = replies
    assert not reply.items
    assert len(reply.uniform.tokens) == 2 * DEPTH
    assert reply.uniform.q.probabilities_slice.length
    assert bool(reply.uniform.q.ids_slice.length) == (top_m is not None)


async def test_of_a_q_too_large_for_one_message_the_first_tokens_are_sent(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(pair) as both:
        vocabulary = both.worker.drafter.draft.config.vocab_size
        for room, drafted in ((2, 1), (4, 2), (1, 0)):
            monkeypatch.setattr("draft_service.replies.MOST_Q_BYTES", room * 2 * vocabulary)  # of bfloat16
            await both.start(f"a{room}", [1, 2, 3])
            await both.start(f"b{room}", [1, 2, 3])
            items = [pb.VerifyItem(sequence_id=f"{name}{room}", round=1, k=DEPTH) for name in "ab"]
            batch = pb.VerifyBatch(batch_id=room, items=items, patience_seconds=10)
            await both.client.send(pb.RoundsRequest(verify=batch))
            results = (await both.client.read()).verified.results
            assert [result.drafted for result in results] == [drafted, drafted]


@pytest.mark.parametrize("broken", ["from_protos", "_add_uniform"], ids=["reading the request", "making the reply"])
async def test_a_failed_draft_request_gets_no_guesses_and_the_next_is_drafted(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    async with following(pair) as both:
        await both.start("a", [1, 2, 3, 4, 5])
        with monkeypatch.context() as patch:
            patch.setattr(f"draft_service.replies.{broken}", Mock(side_effect=RuntimeError("no memory")))
            (plain,) = await both.decode("a", 1, DEPTH)
        assert (plain.drafted, len(plain.tokens)) == (0, 1)
        assert plain.undrafted not in (pb.UNDRAFTED_LATE, pb.UNDRAFTED_LOST)
        assert (await both.decode("a", 1, DEPTH))[0].drafted == DEPTH


async def test_a_draft_whose_stream_breaks_is_asked_again_on_the_next(pair: tuple[Path, Path]) -> None:
    async with following(pair) as both:
        await both.start("a", [1, 2, 3, 4, 5])
        assert {result.drafted for result in await both.decode("a", 3, DEPTH)} == {DEPTH}
        await both.stop_draft()
        (plain,) = await both.decode("a", 1, DEPTH)
        assert plain.undrafted == pb.UNDRAFTED_LOST
        await both.start_draft()

        async def drafted() -> bool:
            return (await both.decode("a", 1, DEPTH))[0].drafted == DEPTH

        assert await eventually(drafted)


async def test_a_draft_that_takes_long_for_a_request_says_that_it_works(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_WORKING_SECONDS", 0.05)
    async with following(pair) as both:
        await both.start("a", [1, 2, 3, 4, 5])
        propose, works = both.worker.drafter.propose, Mock()

        def slowly(*given: Any) -> Any:
            time.sleep(0.5)
            return propose(*given)

        monkeypatch.setattr(both.verifier.engine.draft_requests, "works", works)
        monkeypatch.setattr(both.worker.drafter, "propose", slowly)
        assert (await both.decode("a", 1, DEPTH))[0].drafted == DEPTH
        assert works.called
        assert not both.requests.unanswered
