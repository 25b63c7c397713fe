"""The verifier as a draft (MagicDec): the same protocol, answered by the target between its other steps."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
import torch

from spire.model.target import Target
from spire.rpc.tensors import from_wire
from spire.v1 import draft_pb2 as pb
from spire.v1 import draft_pb2_grpc as rpc
from spire.v1 import tensor_pb2 as codes
from spire.v1 import verifier_pb2
from tests.verifier.conftest import Running
from tests.verifier.harness import GREEDY, Client, Verifier, plain_greedy, prompt_of, slow_steps
from tests.verifier.test_lifetimes import until

SAMPLED = codes.Sampling(temperature=1, top_p=1, seed=5)


def guess(sequence_id: str, base: int, newest: int, k: int = 4, sampling: codes.Sampling = GREEDY) -> pb.ProposeItem:
    return pb.ProposeItem(sequence_id=sequence_id, base=base, newest_token=newest, k=k, sampling=sampling)


async def propose(client: Client, *items: pb.ProposeItem) -> list[pb.Proposal]:
    """In the order of `items`."""
    call = rpc.DraftStub(client.channel).Rounds(metadata=[client.name])
    try:
        await call.write(pb.ProposeBatch(batch_id=1, items=items))
        by_id = {proposal.sequence_id: proposal for proposal in (await asyncio.wait_for(call.read(), 20)).proposals}
    finally:
        call.cancel()
    return [by_id[item.sequence_id] for item in items]


async def decode(client: Client, sequence_id: str, prompt: list[int], rounds: int) -> tuple[list[int], list[int]]:
    """Greedy tokens of some rounds of four guesses, and how many of them were accepted in each."""
    started = await client.start(sequence_id, prompt, draft_id="magicdec")
    tokens, accepted = [started.token], []
    for round_ in range(1, rounds + 1):
        base = len(prompt) + len(tokens) - 1
        (proposal,) = await propose(client, guess(sequence_id, base, tokens[-1]))
        item = verifier_pb2.VerifyItem(
            sequence_id=sequence_id, round=round_, base=base, draft_tokens=proposal.tokens, q=proposal.q
        )
        (result,) = await client.verify(item)
        tokens += result.tokens
        accepted.append(result.accepted)
    return tokens, accepted


async def test_every_greedy_guess_stands_while_the_context_fits_into_the_window(
    running: Running, target: Target
) -> None:
    async with running(self_window=150) as verifier:
        tokens, accepted = await decode(verifier.client(), "a", prompt_of(60), rounds=6)
    assert accepted == [4] * 6
    assert tokens == plain_greedy(target, prompt_of(60), 31)


async def test_guesses_through_a_short_window_change_no_greedy_token(running: Running, target: Target) -> None:
    async with running(self_window=16, token_budget=64) as verifier:
        tokens, accepted = await decode(verifier.client(), "a", prompt_of(120), rounds=12)
    assert tokens == plain_greedy(target, prompt_of(120), len(tokens))
    assert 0 < sum(accepted) < 4 * 12, "some guesses must be right and some wrong"


async def test_q_is_what_the_guesses_were_drawn_from(running: Running) -> None:
    async with running(self_top_m=7) as verifier:
        client, prompt = verifier.client(), prompt_of(20)
        started = await client.start("a", prompt, SAMPLED)
        (proposal,) = await propose(client, guess("a", 20, started.token, sampling=SAMPLED))
        q = proposal.q
        assert from_wire(q.ids).shape == (4, 7)
        torch.testing.assert_close(from_wire(q.probabilities).sum(dim=1), torch.ones(4))
        item = verifier_pb2.VerifyItem(sequence_id="a", round=1, base=20, draft_tokens=proposal.tokens, q=q)
        (result,) = await client.verify(item)
        assert result.status.code == codes.CODE_OK


async def test_only_what_follows_the_newest_token_is_guessed(verifier: Verifier) -> None:
    client, prompt = verifier.client(), prompt_of(9)
    token = (await client.start("a", prompt)).token
    proposals = await propose(client, guess("stranger", 9, token), guess("a", 8, token))
    assert [p.status.code for p in proposals] == [codes.CODE_NOT_FOUND, codes.CODE_FAILED_PRECONDITION]
    (other_token,) = await propose(client, guess("a", 9, (token + 1) % 300))
    assert other_token.status.code == codes.CODE_FAILED_PRECONDITION
    assert all(p.status.message and not p.tokens for p in [*proposals, other_token])
    (right,) = await propose(client, guess("a", 9, token))
    assert len(right.tokens) == 4


async def test_a_sequence_that_is_still_prefilling_is_not_guessed_for(running: Running) -> None:
    async with running(token_budget=1) as verifier:
        slow_steps(verifier)
        client = verifier.client()
        await client.send_start("a", prompt_of(199))
        await until(lambda: verifier.engine.sequences)
        (refused,) = await propose(client, guess("a", 199, 0))
        assert refused.status.code == codes.CODE_FAILED_PRECONDITION
        assert "prefilling" in refused.status.message


async def test_guesses_do_not_wait_for_a_long_prompt(running: Running) -> None:
    async with running(token_budget=1) as verifier:
        slow_steps(verifier)
        client = verifier.client()
        token = (await client.start("a", prompt_of(9))).token
        await client.send_start("long", prompt_of(199))
        await until(lambda: "long" in verifier.engine.sequences)
        (proposal,) = await propose(client, guess("a", 9, token))
        assert len(proposal.tokens) == 4
        assert verifier.engine.sequences["long"].started is None


async def test_a_mixed_batch_gives_each_its_own_guesses(verifier: Verifier) -> None:
    """Sampled and greedy, of other lengths and depths: what each would get alone."""
    client = verifier.client()
    wanted = [("a", 9, 4, GREEDY), ("b", 120, 2, SAMPLED), ("c", 33, 0, GREEDY), ("d", 70, 3, GREEDY)]
    items = []
    for name, length, k, sampling in wanted:
        token = (await client.start(name, prompt_of(length), sampling)).token
        items.append(guess(name, length, token, k, sampling))
    together = await propose(client, *items[::-1])
    alone = [(await propose(client, item))[0] for item in items[::-1]]
    assert [list(p.tokens) for p in together] == [list(p.tokens) for p in alone]
    assert [len(p.tokens) for p in together] == [3, 0, 2, 4]


async def test_its_sequences_are_kept_out_of_the_activations(verifier: Verifier) -> None:
    follower = await verifier.follower("magicdec-is-not-this")
    client = verifier.client()
    await decode(client, "a", prompt_of(30), rounds=2)
    await client.start("followed", prompt_of(12), draft_id="magicdec-is-not-this")
    message = await follower.read()
    assert {span.sequence_id for span in message.spans} == {"followed"}
    assert not follower.rows.get("a")


async def test_the_handshake_says_whose_draft_it_is(verifier: Verifier) -> None:
    info = await rpc.DraftStub(verifier.client().channel).GetInfo(pb.DraftGetInfoRequest())
    assert (info.kind, info.draft_id, info.following) == ("magicdec", "magicdec", True)
    assert (info.target_fingerprint, info.tokenizer_hash) == (
        verifier.info.target_fingerprint,
        verifier.info.tokenizer_hash,
    )
    assert info.state_bytes_per_sequence == 0


async def test_drafting_is_counted_apart(verifier: Verifier) -> None:
    await decode(verifier.client(), "a", prompt_of(9), rounds=3)
    value = verifier.engine.metrics.registry.get_sample_value
    assert value("spire_verifier_steps_total", {"kind": "draft"}) == 12
    assert value("spire_verifier_positions_total", {"kind": "draft"}) == 12
    assert value("spire_verifier_busy_seconds_total", {"kind": "draft"}) > 0


@pytest.mark.parametrize("what", ["propose", "release"])
async def test_who_leaves_before_the_answer_does_not_end_the_engine(verifier: Verifier, what: str) -> None:
    client, prompt = verifier.client(), prompt_of(9)
    token = (await client.start("a", prompt)).token
    verifier.engine.call(time.sleep, 0.5)
    if what == "propose":
        call = rpc.DraftStub(client.channel).Rounds(metadata=[client.name])
        await call.write(pb.ProposeBatch(batch_id=1, items=[guess("a", 9, token)]))
        await asyncio.sleep(0.1)
        call.cancel()
    else:
        request = verifier_pb2.ReleaseRequest(sequence_ids=["b"])
        with pytest.raises(grpc.aio.AioRpcError):
            await client.stub.Release(request, metadata=[client.name], timeout=0.1)
    (proposal,) = await propose(client, guess("a", 9, token))
    assert len(proposal.tokens) == 4
    assert not verifier.engine.ended.done()
