"""Rounds through the real service: whatever the draft proposes, the text is the target's own."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import torch

from spire.model.target import Target
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.harness import (
    GREEDY,
    VOCAB,
    Client,
    Verifier,
    distribution,
    plain_greedy,
    prompt_of,
    slow_steps,
)

pytestmark = pytest.mark.usefixtures("each_backend")


def item(sequence_id: str, round_: int, base: int, draft: list[int] | None = None) -> pb.VerifyItem:
    return pb.VerifyItem(sequence_id=sequence_id, round=round_, base=base, draft_tokens=draft or [])


def garbage(count: int, random_: random.Random) -> list[int]:
    return [random_.randrange(VOCAB) for _ in range(count)]


@pytest.mark.fault(12)
async def test_greedy_text_is_the_targets_own_whatever_is_drafted(verifier: Verifier, target: Target) -> None:
    """Five sequences of different lengths, drafts of mixed depth (0 too), some right, most wrong; mates prefilling."""
    client, random_ = verifier.client(), random.Random(0)
    prompts = {f"s{n}": prompt_of(length) for n, length in enumerate((1, 3, 17, 40, 90))}
    wanted = {name: plain_greedy(target, prompt, 40) for name, prompt in prompts.items()}
    got: dict[str, list[int]] = {}
    rounds = dict.fromkeys(prompts, 0)
    for name, prompt in prompts.items():
        await client.send_start(name, prompt)
    accepted = 0
    while any(len(tokens) < 40 for tokens in got.values()) or len(got) < len(prompts):
        live = [name for name in got if len(got[name]) < 40]
        drafts = {}
        for name in live:
            rounds[name] += 1
            right = wanted[name][len(got[name]) : len(got[name]) + random_.randrange(3)]
            drafts[name] = [*right, *garbage(random_.randrange(4), random_)]
        if live:
            await client.send_verify(
                *(item(name, rounds[name], len(prompts[name]) + len(got[name]) - 1, drafts[name]) for name in live)
            )
        answer = await client.read()
        while answer.HasField("started"):
            got[answer.started.sequence_id] = [answer.started.token]
            if not live and len(got) == 1:
                break
            answer = await client.read()
        for result in answer.verified.results:
            assert result.status.code == codes.CODE_OK, result.status.message
            assert len(result.tokens) == result.accepted + 1
            assert list(result.tokens[:-1]) == drafts[result.sequence_id][: result.accepted]
            got[result.sequence_id] += result.tokens
            accepted += result.accepted
    for name in prompts:
        assert got[name][:40] == wanted[name], name
    assert accepted > 0


async def decode(
    client: Client, name: str, prompt: list[int], sampling: codes.Sampling, depths: list[int]
) -> list[int]:
    """Sampled decoding with a uniform draft over 8 tokens at each of these depths."""
    started = await client.start(name, prompt, sampling)
    tokens, base = [started.token], started.base
    for round_, k in enumerate(depths, 1):
        ids_KM = torch.arange(8).expand(k, 8)
        block = pb.VerifyItem(sequence_id=name, round=round_, base=base, draft_tokens=[3] * k)
        if k:
            block.q.CopyFrom(distribution(ids_KM, torch.full((k, 8), 1 / 8)))
        (result,) = await client.verify(block)
        assert result.status.code == codes.CODE_OK, result.status.message
        tokens += result.tokens
        base += result.accepted + 1
    return tokens


async def test_sampled_text_depends_on_the_seed_and_on_nothing_else(verifier: Verifier) -> None:
    client, prompt = verifier.client(), prompt_of(12)
    sampling = codes.Sampling(temperature=1, top_p=0.9, top_k=50, seed=2**64 - 3)
    alone = await decode(client, "a", prompt, sampling, [0, 3, 2, 0, 4])
    await client.start("other", prompt_of(30))
    assert await decode(client, "b", prompt, sampling, [0, 3, 2, 0, 4]) == alone
    other_seed = codes.Sampling(temperature=1, top_p=0.9, top_k=50, seed=7)
    assert await decode(client, "c", prompt, other_seed, [0, 3, 2, 0, 4]) != alone


@pytest.mark.fault(8)
async def test_a_repeated_round_returns_the_stored_answer(verifier: Verifier) -> None:
    client = verifier.client()
    sampling = codes.Sampling(temperature=1, top_p=1, seed=5)
    started = await client.start("a", prompt_of(9), sampling)
    (first,) = await client.verify(item("a", 1, started.base))
    (again,) = await client.verify(item("a", 1, started.base))
    assert again == first
    (following,) = await client.verify(item("a", 2, started.base + 1))
    assert following.status.code == codes.CODE_OK


@pytest.mark.parametrize(("name", "says"), [("", "is empty"), ("x" * 257, "257 characters, at most 256")])
async def test_a_sequence_has_a_name_and_not_a_long_one(verifier: Verifier, name: str, says: str) -> None:
    refused = await verifier.client().start(name, prompt_of(3))
    assert refused.status.code == codes.CODE_INVALID_ARGUMENT
    assert says in refused.status.message


@pytest.mark.fault(8)
async def test_a_repeated_start_gets_the_stored_answer_and_another_is_refused(verifier: Verifier) -> None:
    client = verifier.client()
    started = await client.start("a", prompt_of(9))
    assert await client.start("a", prompt_of(9)) == started
    refused = await client.start("a", prompt_of(10))
    assert refused.status.code == codes.CODE_INVALID_ARGUMENT


@pytest.mark.fault(8)
async def test_stale_rounds_and_wrong_bases_are_refused(verifier: Verifier) -> None:
    client = verifier.client()
    started = await client.start("a", prompt_of(9))
    await client.verify(item("a", 1, started.base))
    for wrong in (item("a", 1, 3), item("a", 3, started.base + 1), item("a", 2, started.base), item("a", 0, 9)):
        (result,) = await client.verify(wrong)
        assert result.status.code == codes.CODE_FAILED_PRECONDITION, wrong
        assert result.status.message


def bad_items(base: int) -> dict[str, tuple[pb.VerifyItem, codes.Code]]:
    """Items for a sampled sequence `a`, each wrong in one way."""
    tokens, ids, probs = [3, 4], torch.arange(8).expand(2, 8), torch.full((2, 8), 1 / 8)
    good = distribution(ids, probs)

    def with_q(q: pb.DraftDistribution | None, draft: list[int] = tokens, name: str = "a") -> pb.VerifyItem:
        return pb.VerifyItem(sequence_id=name, round=1, base=base, draft_tokens=draft, q=q)

    misshapen, wrong_dtype = pb.DraftDistribution(), pb.DraftDistribution()
    misshapen.CopyFrom(good)
    misshapen.ids.data = good.ids.data[:-1]
    wrong_dtype.CopyFrom(good)
    wrong_dtype.probabilities.dtype = codes.DTYPE_INT32
    endless = pb.DraftDistribution(probabilities=codes.Tensor(dtype=codes.DTYPE_FLOAT32, shape=[2**32 - 1] * 3 + [0]))
    outside = ids.clone()
    outside[1, 7] = VOCAB
    nan = probs.clone()
    nan[0, 0] = float("nan")
    invalid = codes.CODE_INVALID_ARGUMENT
    return {
        "unknown sequence": (with_q(good, name="nobody"), codes.CODE_NOT_FOUND),
        "draft token out of vocabulary": (with_q(good, [3, VOCAB]), invalid),
        "too deep": (with_q(None, [1] * 17), invalid),
        "no q": (with_q(None), invalid),
        "bytes and shape disagree": (with_q(misshapen), invalid),
        "wrong dtype": (with_q(wrong_dtype), invalid),
        "a shape that no tensor has": (with_q(endless), invalid),
        "q of another depth": (with_q(good, [3]), invalid),
        "q id out of vocabulary": (with_q(distribution(outside, probs)), invalid),
        "negative q id": (with_q(distribution(ids - 1, probs)), invalid),
        "q names an id twice": (with_q(distribution(torch.full((2, 8), 3), probs)), invalid),
        "q not normalised": (with_q(distribution(ids, probs * 1.01)), invalid),
        "q not finite": (with_q(distribution(ids, nan)), invalid),
        "q negative": (with_q(distribution(ids, probs * torch.tensor([-1.0, *[9 / 7] * 7]))), invalid),
        "drawn token not in q": (with_q(good, [3, 200]), invalid),
    }


@pytest.mark.parametrize("case", sorted(bad_items(0)))
@pytest.mark.fault(10)
async def test_one_bad_item_never_fails_its_mates(verifier: Verifier, target: Target, case: str) -> None:
    client, prompt = verifier.client(), prompt_of(9)
    started = await client.start("a", prompt, codes.Sampling(temperature=1, top_p=1, seed=5))
    mate = await client.start("mate", prompt)
    bad, code = bad_items(started.base)[case]
    wrong, right = await client.verify(bad, item("mate", 1, mate.base, [7, 8]))
    assert (wrong.status.code, bool(wrong.status.message)) == (code, True)
    assert right.status.code == codes.CODE_OK
    assert [mate.token, *right.tokens] == plain_greedy(target, prompt, 1 + len(right.tokens))
    (after,) = await client.verify(item("a", 1, started.base))
    assert after.status.code == codes.CODE_OK, "a refused block changes nothing"


async def test_a_q_wider_than_the_vocabulary_is_refused_before_others_are_padded(verifier: Verifier) -> None:
    client = verifier.client()
    started = await client.start("a", prompt_of(9), codes.Sampling(temperature=1, top_p=1, seed=5))
    width = 100 * VOCAB
    q = distribution(torch.arange(width)[None], torch.full((1, width), 1 / width))
    block = pb.VerifyItem(sequence_id="a", round=1, base=started.base, draft_tokens=[3], q=q)
    (refused,) = await client.verify(block)
    assert f"m at most {VOCAB}" in refused.status.message


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [
        ([], GREEDY),
        ([0, VOCAB], GREEDY),
        ([2] * 201, GREEDY),
        ([2], codes.Sampling(temperature=float("nan"), top_p=1)),
        ([2], codes.Sampling(temperature=-1, top_p=1)),
        ([2], codes.Sampling(temperature=1, top_p=0)),
        ([2], codes.Sampling(temperature=1, top_p=1.5)),
    ],
)
@pytest.mark.fault(17)
async def test_a_wrong_start_is_refused_with_a_reason(
    verifier: Verifier, tokens: list[int], sampling: codes.Sampling
) -> None:
    client = verifier.client()
    refused = await client.start("a", tokens, sampling)
    assert refused.status.code == codes.CODE_INVALID_ARGUMENT
    assert refused.status.message
    assert (await client.start("a", prompt_of(4))).status.code == codes.CODE_OK


async def test_a_sequence_ends_at_the_context_and_not_before(verifier: Verifier, target: Target) -> None:
    client, prompt = verifier.client(), prompt_of(197)
    started = await client.start("a", prompt)
    (too_deep,) = await client.verify(item("a", 1, 197, [5, 5, 5]))
    assert too_deep.status.code == codes.CODE_INVALID_ARGUMENT
    (last,) = await client.verify(item("a", 1, 197, [5, 5]))
    assert last.status.code == codes.CODE_OK
    assert [started.token, *last.tokens] == plain_greedy(target, prompt, 1 + len(last.tokens))


@pytest.mark.fault(22)
async def test_batches_of_two_gateways_are_answered_on_their_own_streams(verifier: Verifier, target: Target) -> None:
    clients = [verifier.client(f"gateway {n}") for n in range(2)]
    prompts = [prompt_of(5 + n) for n in range(2)]
    got = [[(await client.start(f"s{n}", prompts[n])).token] for n, client in enumerate(clients)]
    for round_ in range(1, 6):
        batches = [client.verify(item(f"s{n}", round_, 5 + n + round_ - 1)) for n, client in enumerate(clients)]
        for n, (result,) in enumerate(await asyncio.gather(*batches)):
            got[n] += result.tokens
    assert got == [plain_greedy(target, prompt, 6) for prompt in prompts]


async def test_rounds_sent_ahead_are_answered_in_order(verifier: Verifier, target: Target) -> None:
    client, prompt = verifier.client(), prompt_of(6)
    started = await client.start("a", prompt)
    for round_ in range(1, 5):
        await client.send_verify(item("a", round_, started.base + round_ - 1))
    answers = [(await client.read()).verified for _ in range(4)]
    assert [answer.batch_id for answer in answers] == [1, 2, 3, 4]
    tokens = [started.token, *(answer.results[0].tokens[0] for answer in answers)]
    assert tokens == plain_greedy(target, prompt, 5)


async def test_answers_carry_their_own_timings(verifier: Verifier) -> None:
    client = verifier.client()
    started = await client.start("a", prompt_of(50))
    await client.send_verify(item("a", 1, started.base))
    for timings in (started.timings, (await client.read()).verified.timings):
        assert 0 < timings.forward_seconds <= timings.total_seconds < 5
        assert timings.queue_seconds >= 0
        assert timings.sample_seconds > 0


async def test_what_a_round_took_is_told_however_late_its_answer_is_read(verifier: Verifier) -> None:
    slow_steps(verifier)
    client = verifier.client()
    started = await client.start("a", prompt_of(6))
    for round_ in range(1, 5):
        await client.send_verify(item("a", round_, started.base + round_ - 1))
    over_at = []
    for _ in range(4):
        await asyncio.sleep(0.3)
        over_at.append((await client.read()).verified.over_at)
    assert all(0.01 <= later - earlier < 0.3 for earlier, later in itertools.pairwise(over_at))


@pytest.mark.parametrize("batch", [(0, 2, 3), (1, 2), (0, 5), (3, 1, 5, 0)])
async def test_sequences_between_those_of_a_batch_are_untouched(
    verifier: Verifier, target: Target, batch: tuple[int, ...]
) -> None:
    """Some batches are read together with what lies between them, others gathered: nobody notices."""
    client = verifier.client()
    prompts = [prompt_of(20 + 3 * n) for n in range(6)]
    got = [[(await client.start(str(n), prompt)).token] for n, prompt in enumerate(prompts)]
    for members in (batch, range(6)):
        done = [len(tokens) for tokens in got]
        blocks = [item(str(n), done[n], len(prompts[n]) + done[n] - 1, [7, 7]) for n in members]
        for n, result in zip(members, await client.verify(*blocks), strict=True):
            got[n] += result.tokens
    for prompt, tokens in zip(prompts, got, strict=True):
        assert tokens == plain_greedy(target, prompt, len(tokens))
