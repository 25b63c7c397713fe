"""MagicDec: the target guesses for itself, as part of the round that it verifies."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest

from spire.decoding.drafting import Drafted
from spire.model.target import Target
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import GREEDY, Client, Verifier, plain_greedy, prompt_of, slow_steps
from tests.verifier_service.serve.test_lifetimes import until

pytestmark = pytest.mark.usefixtures("each_backend")

SAMPLED = codes.Sampling(temperature=1, top_p=1, seed=5)
ITSELF = "magicdec"


def block(sequence_id: str, round_: int = 1, k: int = 4) -> pb.VerifyItem:
    return pb.VerifyItem(sequence_id=sequence_id, round=round_, k=k)


async def decode(client: Client, sequence_id: str, prompt: list[int], rounds: int) -> tuple[list[int], list[int]]:
    """Greedy tokens of some rounds of four guesses, and how many of them were accepted in each."""
    started = await client.start(sequence_id, prompt, draft_id=ITSELF)
    tokens, accepted = [started.token], []
    for round_ in range(1, rounds + 1):
        (result,) = await client.verify(block(sequence_id, round_))
        assert result.drafted == 4
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


@pytest.mark.parametrize("top_m", [0, 7])
async def test_a_sampled_guess_over_the_full_window_is_accepted_where_q_is_p(running: Running, top_m: int) -> None:
    """With all of the vocabulary every guess stands, because q is p; with seven candidates of 300 some do not."""
    async with running(self_window=190, self_top_m=top_m or 300) as verifier:
        client = verifier.client()
        await client.start("a", prompt_of(20), SAMPLED, draft_id=ITSELF)
        results = [(await client.verify(block("a", round_, k=2)))[0] for round_ in range(1, 31)]
    assert all(result.status.code == codes.CODE_OK and result.drafted == 2 for result in results)
    accepted = sum(result.accepted for result in results)
    # q travels in bfloat16 where it is of all the vocabulary: a guess in some hundred falls to that.
    assert accepted >= 57 if not top_m else accepted < 57


async def test_a_block_beside_long_prompts_is_guessed_before_they_are_read(running: Running) -> None:
    async with running(token_budget=1) as verifier:
        slow_steps(verifier)
        client = verifier.client()
        await client.start("a", prompt_of(9), draft_id=ITSELF)
        await client.send_start("long", prompt_of(199))
        await until(lambda: "long" in verifier.engine.sequences)
        (result,) = await client.verify(block("a"))
        assert result.drafted == 4
        assert verifier.engine.sequences["long"].started is None


async def test_a_mixed_batch_gives_each_what_it_would_get_alone(verifier: Verifier) -> None:
    """Sampled and greedy, of other lengths and depths, one that nobody drafts for."""
    wanted = [("a", 9, 4, GREEDY), ("b", 120, 2, SAMPLED), ("c", 33, 0, GREEDY), ("d", 70, 3, GREEDY)]
    client, found = verifier.client(), {}
    for life, batches in (("together", [wanted[::-1]]), ("alone", [[one] for one in wanted])):
        for name, length, _, sampling in wanted:
            draft_id = "" if name == "c" else ITSELF
            await client.start(f"{name} {life}", prompt_of(length), sampling, draft_id=draft_id)
        results = {}
        for batch in batches:
            for result in await client.verify(*(block(f"{name} {life}", k=k) for name, _, k, _ in batch)):
                results[result.sequence_id[0]] = (list(result.tokens), result.drafted)
        found[life] = results
    assert found["together"] == found["alone"]
    assert {name: drafted for name, (_, drafted) in found["alone"].items()} == {"a": 4, "b": 2, "c": 0, "d": 3}


async def test_guesses_end_where_the_context_does(verifier: Verifier) -> None:
    client = verifier.client()
    started = await client.start("a", prompt_of(197), draft_id=ITSELF)
    (result,) = await client.verify(block("a", k=8))
    assert result.status.code == codes.CODE_OK
    assert result.drafted == verifier.info.max_context - started.base - 1


@pytest.mark.parametrize("top_m", [7, 300])
async def test_two_gateways_whose_blocks_differ_in_depth_share_a_step(running: Running, top_m: int) -> None:
    """Each gateway's are drafted at once, as deep as the deepest of them."""
    async with running(self_top_m=top_m) as verifier:
        gateways = {name: verifier.client(name) for name in ("one", "two")}
        for name, client in gateways.items():
            for at in range(2):
                await client.start(f"{name} {at}", prompt_of(9 + at), SAMPLED, draft_id=ITSELF)
        holds, go_on = threading.Event(), threading.Event()
        verifier.engine.call(lambda: (holds.set(), go_on.wait(30)))
        await asyncio.to_thread(holds.wait)
        for name, client in gateways.items():
            await client.send_verify(block(f"{name} 0", k=4), block(f"{name} 1", k=1 + (name == "two")))
        await until(lambda: len(verifier.engine._inbox) == 2)
        go_on.set()
        results = [result for client in gateways.values() for result in (await client.read()).verified.results]
    assert [result.status.code for result in results] == [codes.CODE_OK] * 4
    assert [result.drafted for result in results] == [4, 1, 4, 2]


async def test_no_more_is_drafted_than_any_draft_does(running: Running) -> None:
    async with running(max_depth=60, self_window=16) as verifier:
        client = verifier.client()
        await client.start("a", prompt_of(60), draft_id=ITSELF)
        (result,) = await client.verify(block("a", k=60))
    assert result.drafted == 16


async def test_its_sequences_are_kept_out_of_the_activations(verifier: Verifier) -> None:
    follower = await verifier.follower("magicdec-is-not-this")
    client = verifier.client()
    await decode(client, "a", prompt_of(30), rounds=2)
    await client.start("followed", prompt_of(12), draft_id="magicdec-is-not-this")
    message = await follower.read()
    assert {span.sequence_id for span in message.spans} == {"followed"}
    assert not follower.rows.get("a")


async def test_drafting_is_counted_apart(verifier: Verifier) -> None:
    await decode(verifier.client(), "a", prompt_of(9), rounds=3)
    value = verifier.engine.metrics.registry.get_sample_value
    assert value("spire_verifier_steps_total", {"kind": "draft"}) == 12
    assert value("spire_verifier_positions_total", {"kind": "draft"}) == 12
    assert value("spire_verifier_busy_seconds_total", {"kind": "draft"}) > 0


@pytest.mark.fault(5)
async def test_where_it_cannot_guess_blocks_are_decoded_plainly(
    verifier: Verifier, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = verifier.client()
    await client.start("a", prompt_of(9), draft_id=ITSELF)

    def fails(*_: object) -> Drafted:
        raise RuntimeError("no memory for guesses")

    monkeypatch.setattr(verifier.engine.steps, "draft", fails)
    (result,) = await client.verify(block("a"))
    assert (result.undrafted, result.drafted) == (pb.UNDRAFTED_ERROR, 0)
    assert list(result.tokens) == plain_greedy(target, prompt_of(9), 2)[1:]


async def test_a_sequence_ending_before_its_guess_costs_its_mate_nothing(verifier: Verifier) -> None:
    client = verifier.client()
    for name in ("a", "b"):
        await client.start(name, prompt_of(9), draft_id=ITSELF)
    orders = verifier.engine.draft_requests
    place = orders.place

    def end_one(task: object) -> None:
        place(task)  # type: ignore[arg-type]
        verifier.engine.slots.release(["a"])

    orders.place = end_one  # type: ignore[method-assign,assignment]
    gone, result = await client.verify(block("a"), block("b"))
    assert gone.status.code == codes.CODE_NOT_FOUND
    assert (result.status.code, result.drafted) == (codes.CODE_OK, 4)


async def test_who_leaves_before_a_release_is_answered_does_not_end_the_engine(verifier: Verifier) -> None:
    client, prompt = verifier.client(), prompt_of(9)
    await client.start("a", prompt, draft_id=ITSELF)
    verifier.engine.call(time.sleep, 0.5)
    request = pb.ReleaseRequest(sequence_ids=["b"])
    with pytest.raises(grpc.aio.AioRpcError):
        await client.stub.Release(request, metadata=[client.name], timeout=0.1)
    (result,) = await client.verify(block("a"))
    assert result.drafted == 4
    assert not verifier.engine.ended.done()
