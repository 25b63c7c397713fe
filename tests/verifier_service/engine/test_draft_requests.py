"""What the verifier asks of a draft: where the block begins, how deep, in time; and what becomes of bad guesses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from spire.model.target import Target
from spire.v1 import draft_pb2, tensor_pb2, verifier_pb2 as pb
from tests.verifier_service.harness import (
    GREEDY,
    VOCAB,
    Client,
    Follower,
    Verifier,
    distribution,
    plain_greedy,
    prompt_of,
)
from tests.verifier_service.serve.test_lifetimes import until
from verifier_service.engine.batch import RaggedBatch
from verifier_service.engine.step import Outcome, PromptChunk

SAMPLED = tensor_pb2.Sampling(temperature=1, top_p=1, seed=5)
OK = tensor_pb2.ItemStatus(code=tensor_pb2.CODE_OK)
# What no draft can have drawn from.
HALF = distribution(torch.tensor([[1], [2]]), torch.tensor([[1.0], [0.5]]))
# Longer than anything takes here.
PATIENCE = 20.0


class Draft(Follower):
    """A draft that is asked, and answers what a test tells it to."""

    async def guess(self, order: draft_pb2.DraftRequest, *proposals: draft_pb2.DraftReplyItem) -> None:
        timings = pb.Timings(forward_seconds=0.25, queue_seconds=0.125)
        await self.reply(draft_pb2.DraftReply(batch_id=order.batch_id, items=proposals, timings=timings))


@asynccontextmanager
async def drafting(verifier: Verifier, draft_id: str = "draft") -> AsyncIterator[Draft]:
    draft = Draft(verifier.address, verifier.info, draft_id)
    await draft.subscribed()
    yield draft
    await draft.close()


def proposal(name: str, tokens: list[int], q: pb.DraftDistribution | None = None) -> draft_pb2.DraftReplyItem:
    return draft_pb2.DraftReplyItem(sequence_id=name, status=OK, tokens=tokens, q=q)


def block(name: str, round_: int, k: int, base: int = 0) -> pb.VerifyItem:
    return pb.VerifyItem(sequence_id=name, round=round_, base=base, k=k)


async def order(client: Client, *items: pb.VerifyItem, patience: float = PATIENCE) -> None:
    batch = pb.VerifyBatch(batch_id=7, items=items, patience_seconds=patience)
    await client.send(pb.RoundsRequest(verify=batch))


async def result(client: Client) -> pb.VerifyResult:
    return (await client.read()).verified.results[0]


async def test_a_draft_is_asked_after_the_newest_token_and_its_guess_is_verified(
    verifier: Verifier, target: Target
) -> None:
    prompt, client = prompt_of(9), verifier.client()
    tokens = plain_greedy(target, prompt, 5)
    async with drafting(verifier) as draft:
        await client.start("a", prompt, GREEDY, "draft")
        await order(client, block("a", 1, k=3))
        asked = await draft.asked()
        assert [(i.sequence_id, i.base, i.newest_token, i.k) for i in asked.items] == [("a", 9, tokens[0], 3)]
        assert asked.items[0].sampling == GREEDY
        await draft.guess(asked, proposal("a", [*tokens[1:3], (tokens[3] + 1) % VOCAB]))
        answer = (await client.read()).verified
        verified = answer.results[0]
        assert (verified.drafted, verified.accepted, list(verified.tokens)) == (3, 2, tokens[1:4])
        assert answer.drafting.forward_seconds == 0.25
        assert answer.timings.queue_seconds < 5, "waiting for the draft is no queue"


async def test_a_guess_that_waits_for_another_s_step_waits_in_the_queue(verifier: Verifier) -> None:
    """Of the three clocks of a round none counts it twice: the draft's, the wire's, and the queue's."""
    client, other, run = verifier.client(), verifier.client("other"), verifier.engine.steps.run
    began = threading.Event()

    def slow(batch: RaggedBatch | None, chunk: PromptChunk | None) -> tuple[Outcome | None, Outcome | None]:
        began.set()
        time.sleep(0.5)
        return run(batch, chunk)

    async with drafting(verifier) as draft:
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await other.start("c", prompt_of(6))
        await order(client, block("a", 1, k=1))
        asked = await draft.asked()
        verifier.engine.steps.run = slow  # type: ignore[method-assign]
        await other.send_verify(pb.VerifyItem(sequence_id="c", round=1, base=6))
        assert await asyncio.to_thread(began.wait, 10)
        verifier.engine.steps.run = run  # type: ignore[method-assign]
        await draft.guess(asked, proposal("a", [5]))
        timings = (await client.read()).verified.timings
        assert 0.4 < timings.queue_seconds < 5


async def test_rounds_sent_ahead_are_drafted_from_where_the_last_one_ended(verifier: Verifier, target: Target) -> None:
    prompt, client = prompt_of(9), verifier.client()
    tokens = plain_greedy(target, prompt, 9)
    async with drafting(verifier) as draft:
        await client.start("a", prompt, GREEDY, "draft")
        for round_ in (1, 2, 3):
            await order(client, block("a", round_, k=2))
        given, base = 1, 9
        for accepted in (2, 0, 1):
            asked = await draft.asked()
            assert (asked.items[0].base, asked.items[0].newest_token) == (base, tokens[given - 1])
            wrong = (tokens[given + accepted] + 1) % VOCAB
            await draft.guess(asked, proposal("a", [*tokens[given : given + accepted], wrong][:2]))
            assert list((await result(client)).tokens) == tokens[given : given + accepted + 1]
            given, base = given + accepted + 1, base + accepted + 1


async def test_of_a_batch_each_draft_is_asked_for_its_own(verifier: Verifier, target: Target) -> None:
    client = verifier.client()
    prompts = {"a": prompt_of(5), "b": prompt_of(6), "plain": prompt_of(7), "none": prompt_of(8)}
    tokens = {name: plain_greedy(target, prompt, 4) for name, prompt in prompts.items()}
    async with drafting(verifier, "one") as one, drafting(verifier, "two") as two:
        for name, draft_id in {"a": "one", "b": "two", "plain": "", "none": "absent"}.items():
            await client.start(name, prompts[name], GREEDY, draft_id)
        await order(client, block("a", 1, 2), block("b", 1, 1), block("plain", 1, 0), block("none", 1, 2))
        for draft, name, k in ((one, "a", 2), (two, "b", 1)):
            asked = await draft.asked()
            assert [(item.sequence_id, item.k) for item in asked.items] == [(name, k)]
            await draft.guess(asked, proposal(name, tokens[name][1 : k + 1]))
        results = {r.sequence_id: r for r in (await client.read()).verified.results}
    expected = {
        "a": tokens["a"][1:4],
        "b": tokens["b"][1:3],
        "plain": tokens["plain"][1:2],
        "none": tokens["none"][1:2],
    }
    assert {name: list(r.tokens) for name, r in results.items()} == expected
    assert [results[name].undrafted for name in prompts] == [0, 0, 0, pb.UNDRAFTED_LOST]


@pytest.mark.fault(2)
async def test_a_draft_that_is_late_costs_its_patience_and_nothing_else(verifier: Verifier, target: Target) -> None:
    prompt, client = prompt_of(9), verifier.client()
    tokens = plain_greedy(target, prompt, 5)
    async with drafting(verifier) as draft:
        await client.start("a", prompt, GREEDY, "draft")
        began = time.monotonic()
        await order(client, block("a", 1, k=2), patience=0.3)
        asked = await draft.asked()
        late = await result(client)
        assert 0.3 <= time.monotonic() - began < 5
        assert (late.undrafted, late.drafted, list(late.tokens)) == (pb.UNDRAFTED_LATE, 0, tokens[1:2])
        await order(client, block("a", 2, k=2))
        owing = await result(client)
        assert (owing.undrafted, list(owing.tokens)) == (pb.UNDRAFTED_OWING, tokens[2:3]), "it is waited for once"
        await draft.guess(asked, proposal("a", tokens[1:3]))  # that counts for nothing any more
        await order(client, block("a", 3, k=1))
        await draft.guess(await draft.asked(), proposal("a", tokens[3:4]))
        back = await result(client)
        assert (back.undrafted, back.accepted, list(back.tokens)) == (0, 1, tokens[3:5])


@pytest.mark.fault(2)
async def test_nobody_else_waits_for_a_late_draft(verifier: Verifier) -> None:
    slow, other = verifier.client("slow"), verifier.client("other")
    async with drafting(verifier) as draft:
        await slow.start("a", prompt_of(9), GREEDY, "draft")
        await other.start("b", prompt_of(6))
        await order(slow, block("a", 1, k=2))
        await draft.asked()
        for round_ in range(1, 5):
            (mate,) = await other.verify(pb.VerifyItem(sequence_id="b", round=round_, base=5 + round_))
            assert mate.status.code == tensor_pb2.CODE_OK


@pytest.mark.parametrize("patience", [float("nan"), -1.0, 0.0])
async def test_without_patience_a_block_is_decoded_at_once(verifier: Verifier, patience: float) -> None:
    client = verifier.client()
    async with drafting(verifier):
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await order(client, block("a", 1, k=2), patience=patience)
        assert (await result(client)).undrafted == pb.UNDRAFTED_LATE


async def test_a_draft_that_leaves_while_it_is_asked_is_not_waited_for(verifier: Verifier) -> None:
    client = verifier.client()
    async with drafting(verifier) as draft:
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await order(client, block("a", 1, k=2))
        await draft.asked()
        draft.leave()
        assert (await asyncio.wait_for(result(client), 5)).undrafted == pb.UNDRAFTED_LOST


async def test_a_draft_that_comes_again_is_asked_there(verifier: Verifier, target: Target) -> None:
    prompt, client = prompt_of(9), verifier.client()
    tokens = plain_greedy(target, prompt, 4)
    async with drafting(verifier) as former:
        await client.start("a", prompt, GREEDY, "draft")
        await order(client, block("a", 1, k=1))
        await former.asked()
        async with drafting(verifier) as newer:
            assert (await result(client)).undrafted == pb.UNDRAFTED_LOST
            former.leave()
            await order(client, block("a", 2, k=1))
            await newer.guess(await newer.asked(), proposal("a", tokens[2:3]))
            assert list((await result(client)).tokens) == tokens[2:4]


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("guessed", "why"),
    [
        ([], pb.UNDRAFTED_ERROR),
        ([proposal("a", [])], pb.UNDRAFTED_BEHIND),
        ([proposal("b", [1, 2])], pb.UNDRAFTED_ERROR),
        ([proposal("a", [1, 2, 3])], pb.UNDRAFTED_ERROR),
        ([proposal("a", [1, VOCAB])], pb.UNDRAFTED_ERROR),
        ([proposal("a", [1, 2])], pb.UNDRAFTED_ERROR),
        ([proposal("a", [1, 2], HALF)], pb.UNDRAFTED_ERROR),
        (
            [draft_pb2.DraftReplyItem(sequence_id="a", status=tensor_pb2.ItemStatus(code=tensor_pb2.CODE_NOT_FOUND))],
            pb.UNDRAFTED_ERROR,
        ),
    ],
    ids=["nothing", "behind", "another's", "too deep", "no token", "without q", "q of no sum", "refused"],
)
async def test_what_a_draft_spoils_is_decoded_plainly_and_its_mate_is_verified(
    verifier: Verifier, guessed: list[draft_pb2.DraftReplyItem], why: pb.Undrafted
) -> None:
    client = verifier.client()
    sure = distribution(torch.tensor([[3], [4]]), torch.ones(2, 1))
    async with drafting(verifier) as draft:
        for name in ("a", "mate"):
            await client.start(name, prompt_of(9), SAMPLED, "draft")
        await order(client, block("a", 1, k=2), block("mate", 1, k=2))
        await draft.guess(await draft.asked(), *guessed, proposal("mate", [3, 4], sure))
        spoilt, mate = (await client.read()).verified.results
    assert (spoilt.status.code, spoilt.undrafted, spoilt.drafted) == (tensor_pb2.CODE_OK, why, 0)
    assert len(spoilt.tokens) == 1
    assert (mate.status.code, mate.undrafted, mate.drafted) == (tensor_pb2.CODE_OK, 0, 2)


async def test_no_more_is_asked_for_than_the_context_holds(verifier: Verifier) -> None:
    client, room = verifier.client(), 3
    prompt = prompt_of(verifier.info.max_context - room)
    async with drafting(verifier) as draft:
        await client.start("a", prompt, GREEDY, "draft")
        await order(client, block("a", 1, k=8))
        asked = await draft.asked()
        assert asked.items[0].k == room - 1
        await draft.guess(asked, proposal("a", [5] * (room - 1)))
        assert (await result(client)).status.code == tensor_pb2.CODE_OK


async def test_a_repeated_order_is_answered_as_before_and_no_draft_is_asked(verifier: Verifier) -> None:
    client = verifier.client()
    async with drafting(verifier) as draft:
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await order(client, block("a", 1, k=1))
        await draft.guess(await draft.asked(), proposal("a", [5]))
        first = await result(client)
        await order(client, block("a", 1, k=1))
        assert await result(client) == first
        await order(client, block("a", 2, k=1))
        assert (await draft.asked()).items[0].base == 9 + len(first.tokens)


async def test_a_sequence_ending_during_its_draft_request_costs_mates_nothing(verifier: Verifier) -> None:
    client = verifier.client()
    async with drafting(verifier) as draft:
        for name in ("a", "mate"):
            await client.start(name, prompt_of(9), GREEDY, "draft")
        await order(client, block("a", 1, k=1), block("mate", 1, k=1))
        asked = await draft.asked()
        assert await client.release("a") == 1
        await draft.guess(asked, proposal("a", [5]), proposal("mate", [5]))
        ended, mate = (await client.read()).verified.results
    assert ended.status.code == tensor_pb2.CODE_NOT_FOUND
    assert (mate.status.code, mate.drafted) == (tensor_pb2.CODE_OK, 1)


async def test_who_leaves_in_the_midst_of_a_drafted_step_leaves_after_it(verifier: Verifier) -> None:
    """The step looks for the order of the next round before it ends."""
    client, other, reached, go_on = verifier.client(), verifier.client("other"), threading.Event(), threading.Event()
    run = verifier.engine.steps.run

    def held(batch: RaggedBatch | None, chunk: PromptChunk | None) -> tuple[Outcome | None, Outcome | None]:
        reached.set()
        assert go_on.wait(20)
        go_on.clear()
        return run(batch, chunk)

    async def stopped() -> None:
        assert await asyncio.to_thread(reached.wait, 20)
        reached.clear()

    async with drafting(verifier) as draft:
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await other.start("c", prompt_of(6))
        await order(client, block("a", 1, k=1))
        asked = await draft.asked()
        verifier.engine.steps.run = held  # type: ignore[method-assign]
        await other.send_verify(pb.VerifyItem(sequence_id="c", round=1, base=6))
        await stopped()  # while this one is under way, a guess and a prompt arrive: they share the next
        await draft.guess(asked, proposal("a", [5]))
        await other.send_start("b", prompt_of(5))
        await until(lambda: len(verifier.engine._inbox) == 2)
        go_on.set()
        await stopped()
        releasing = asyncio.create_task(other.release("b"))
        await until(lambda: len(verifier.engine._inbox) == 1)
        go_on.set()
        assert (await result(client)).drafted == 1
        assert await releasing == 1
        assert (await other.read()).verified.results[0].status.code == tensor_pb2.CODE_OK
        assert (await other.read()).started.status.code == tensor_pb2.CODE_OK
        verifier.engine.steps.run = run  # type: ignore[method-assign]
        go_on.set()
        await order(client, block("a", 2, k=0))
        assert (await result(client)).status.code == tensor_pb2.CODE_OK


async def test_guesses_that_nobody_asked_for_are_nothing_to_anybody(verifier: Verifier) -> None:
    client = verifier.client()
    async with drafting(verifier) as draft, drafting(verifier, "other") as other:
        await client.start("a", prompt_of(9), GREEDY, "draft")
        await draft.reply(draft_pb2.DraftReply(batch_id=99, items=[proposal("a", [5])]))
        await order(client, block("a", 1, k=1))
        asked = await draft.asked()
        await other.guess(asked, proposal("a", [5, 6, 7]))
        await draft.guess(asked, proposal("a", [5]))
        assert (await result(client)).drafted == 1
