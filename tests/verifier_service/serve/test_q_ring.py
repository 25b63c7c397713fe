"""q in memory that the draft shares: a block is verified as if it had brought it, and as an empty one if it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spire.rpc.carrier import OverwritingRing
from spire.rpc.tensors import put as to_wire, without_data
from spire.v1 import draft_pb2, tensor_pb2 as codes, verifier_pb2 as pb
from tests.rings import put
from tests.verifier_service.conftest import Running
from tests.verifier_service.harness import VOCAB, Client, Follower, Verifier, distribution, prompt_of
from verifier_service.engine import blocks

pytestmark = pytest.mark.usefixtures("each_backend")

# Of a sequence whose draft tokens stand or fall by q.
SAMPLED = codes.Sampling(temperature=1, top_p=1, seed=5, rule=codes.RULE_BLOCK)
DRAFT = [3, 4]


def guess() -> tuple[Tensor, Tensor]:
    """Ids and probabilities [2, 8] of a distribution over the first eight tokens."""
    weights = torch.rand(2, 8, generator=torch.Generator().manual_seed(1))
    return torch.arange(8, dtype=torch.int32).expand(2, 8).contiguous(), weights / weights.sum(1, keepdim=True)


def placed(ring: OverwritingRing) -> pb.DraftDistribution:
    ids_KM, probs_KM = guess()
    return pb.DraftDistribution(
        ids=without_data(ids_KM),
        ids_slice=put(ring, ids_KM),
        probabilities=without_data(probs_KM),
        probabilities_slice=put(ring, probs_KM),
    )


async def followed(follower: Follower) -> OverwritingRing:
    await follower.read()
    assert follower.q_ring is not None
    return follower.q_ring


async def verified(client: Client, name: str, q: pb.DraftDistribution | None) -> pb.VerifyResult:
    """The first block of a new sequence; without q it is an empty one."""
    started = await client.start(name, prompt_of(9), SAMPLED, "draft")
    draft = DRAFT if q else []
    (result,) = await client.verify(
        pb.VerifyItem(sequence_id=name, round=1, base=started.base, draft_tokens=draft, q=q)
    )
    return result


def outcome(result: pb.VerifyResult) -> tuple[codes.Code, int, list[int]]:
    return result.status.code, result.accepted, list(result.tokens)


async def test_q_in_the_ring_counts_as_q_in_the_message(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        ring, client = await followed(await verifier.follower(shared_memory=tmp_path)), verifier.client()
        inline = await verified(client, "inline", distribution(*guess()))
        shared = await verified(client, "shared", placed(ring))
        assert outcome(shared) == outcome(inline)
        assert inline.status.code == codes.CODE_OK
        wrong = placed(ring)
        wrong.probabilities_slice.CopyFrom(put(ring, guess()[1] * 1.01))
        assert "sum to 1" in (await verified(client, "wrong", wrong)).status.message, "it is looked at as closely"


async def test_a_block_whose_q_is_gone_is_verified_as_an_empty_one(running: Running, tmp_path: Path) -> None:
    """Overwritten, of an earlier subscription, or of a draft that does not follow any more."""
    async with running(shared_memory=str(tmp_path)) as verifier:
        first = await verifier.follower(shared_memory=tmp_path)
        ring, client = await followed(first), verifier.client()
        plain = outcome(await verified(client, "plain", None))
        assert plain[:2] == (codes.CODE_OK, 0)
        q = placed(ring)
        for _ in range(8):
            put(ring, torch.zeros(ring.size // 4, dtype=torch.uint8))
        assert outcome(await verified(client, "overwritten", q)) == plain
        q = placed(ring)
        second = await verifier.follower(shared_memory=tmp_path)
        await followed(second)
        assert outcome(await verified(client, "earlier", q)) == plain
        await second.close()
        assert outcome(await verified(client, "left", q)) == plain


@pytest.mark.parametrize("during", ["pad", "q_problems"])
async def test_a_block_whose_q_is_overwritten_during_the_read_counts_as_empty(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """A GPU may still read q while the host goes on, until the host has read what is wrong with it."""
    work = getattr(blocks, during)
    async with running(shared_memory=str(tmp_path)) as verifier:
        ring, client = await followed(await verifier.follower(shared_memory=tmp_path)), verifier.client()
        plain = outcome(await verified(client, "plain", None))

        def slowly(*arguments: Any) -> Any:
            found = work(*arguments)
            for _ in range(8):
                put(ring, torch.zeros(ring.size // 4, dtype=torch.uint8))
            return found

        monkeypatch.setattr(blocks, during, slowly)
        assert outcome(await verified(client, "overwritten", placed(ring))) == plain


async def test_a_place_of_another_size_than_its_numbers_is_refused(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        ring, client = await followed(await verifier.follower(shared_memory=tmp_path)), verifier.client()
        q = placed(ring)
        q.ids_slice.length = 4
        result = await verified(client, "a", q)
        assert result.status.code == codes.CODE_INVALID_ARGUMENT
        assert "needs 64 bytes, 4 came" in result.status.message


class RingDraft:
    """A draft that replies as the draft service does: q of all at once, in the ring."""

    def __init__(self, draft: Follower, ring: OverwritingRing):
        self.draft, self.ring = draft, ring

    async def guess(
        self,
        probs_BKV: Tensor,
        shape: list[int] | None = None,
        tokens: int = 6,
        ids_BKM: Tensor | None = None,
        counts: Sequence[int] = (),
    ) -> None:
        """Reply to the next request: every item has the same tokens, all together so many, or its count of them."""
        reply = draft_pb2.DraftReply(batch_id=(await self.draft.asked()).batch_id)
        reply.uniform.tokens.extend((5 * DRAFT)[:tokens])
        reply.uniform.counts.extend(counts)
        q = reply.uniform.q
        q.probabilities.CopyFrom(without_data(probs_BKV))
        if shape is not None:
            q.probabilities.shape[:] = shape
        q.probabilities_slice.CopyFrom(put(self.ring, probs_BKV))
        if ids_BKM is not None:
            q.ids.CopyFrom(without_data(ids_BKM))
            q.ids_slice.CopyFrom(put(self.ring, ids_BKM))
        await self.draft.reply(reply)


@asynccontextmanager
async def told(verifier: Verifier, directory: Path) -> AsyncIterator[RingDraft]:
    follower = await verifier.follower(shared_memory=directory)
    yield RingDraft(follower, await followed(follower))


async def of_three(client: Client, number: int) -> list[pb.VerifyResult]:
    """A round of three sequences that are to be drafted."""
    items = [pb.VerifyItem(sequence_id=name, round=number, k=len(DRAFT)) for name in "abc"]
    await client.send(pb.RoundsRequest(verify=pb.VerifyBatch(batch_id=number, items=items, patience_seconds=20)))
    return list((await client.read()).verified.results)


async def test_q_of_all_proposals_at_once_counts_as_each_ones_own(running: Running, tmp_path: Path) -> None:
    probs_BKV = torch.rand(3, len(DRAFT), VOCAB, generator=torch.Generator().manual_seed(2))
    probs_BKV = (probs_BKV / probs_BKV.sum(-1, keepdim=True)).bfloat16()
    async with running(shared_memory=str(tmp_path)) as verifier, told(verifier, tmp_path) as draft:
        client = verifier.client()
        for name in "abcxyz":
            await client.start(name, prompt_of(9, ord(name) % 3), SAMPLED, "draft")
        together = asyncio.create_task(of_three(client, 1))
        await draft.guess(probs_BKV)
        at_once = await together
        assert [result.drafted for result in at_once] == [2, 2, 2]
        for row, name in enumerate("xyz"):
            twin = "abc".index(next(n for n in "abc" if ord(n) % 3 == ord(name) % 3))
            own = pb.DraftDistribution(
                probabilities=without_data(probs_BKV[twin]), probabilities_slice=put(draft.ring, probs_BKV[twin])
            )
            (alone,) = await client.verify(pb.VerifyItem(sequence_id=name, round=1, draft_tokens=DRAFT, q=own))
            assert outcome(alone) == outcome(at_once[twin]), row


@pytest.mark.parametrize("vocabulary", [VOCAB, 16])
async def test_a_block_whose_draft_stopped_counts_as_a_shorter_one(
    running: Running, tmp_path: Path, vocabulary: int
) -> None:
    """Whatever lies behind the tokens that it got. In one case the draft proposes only some tokens."""
    counts, generator = [1, 2, 1], torch.Generator().manual_seed(6)
    probs_BKM = torch.rand(3, len(DRAFT), vocabulary, generator=generator)
    probs_BKM = (probs_BKM / probs_BKM.sum(-1, keepdim=True)).bfloat16()
    for row, count in enumerate(counts):
        probs_BKM[row, count:] = torch.nan
    ids_M = None if vocabulary == VOCAB else torch.arange(vocabulary, dtype=torch.int32)
    async with running(shared_memory=str(tmp_path)) as verifier, told(verifier, tmp_path) as draft:
        client = verifier.client()
        for name in "abcxyz":
            await client.start(name, prompt_of(9, ord(name) % 3), SAMPLED, "draft")
        together = asyncio.create_task(of_three(client, 1))
        await draft.guess(probs_BKM, ids_BKM=ids_M, counts=counts)
        at_once = await together
        assert [result.drafted for result in at_once] == counts
        for name in "xyz":
            twin = "abc".index(next(n for n in "abc" if ord(n) % 3 == ord(name) % 3))
            q = pb.DraftDistribution()
            to_wire(q.probabilities, probs_BKM[twin, : counts[twin]])
            if ids_M is not None:
                to_wire(q.ids, ids_M)
            item = pb.VerifyItem(sequence_id=name, round=1, draft_tokens=DRAFT[: counts[twin]], q=q)
            (alone,) = await client.verify(item)
            assert outcome(alone) == outcome(at_once[twin])


@pytest.mark.parametrize("counts", [[1, 2], [1, 2, 3], [0, 1, 2], [1, 2, 2, 1]])
async def test_counts_that_do_not_fit_the_order_are_decoded_plainly(
    running: Running, tmp_path: Path, counts: list[int]
) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, told(verifier, tmp_path) as draft:
        client = verifier.client()
        for name in "abc":
            await client.start(name, prompt_of(9), SAMPLED, "draft")
        waiting = asyncio.create_task(of_three(client, 1))
        await draft.guess(torch.full((3, len(DRAFT), VOCAB), 1 / VOCAB), counts=counts)
        assert [result.undrafted for result in await waiting] == [pb.UNDRAFTED_ERROR] * 3


async def test_candidates_of_all_at_once_count_as_the_whole_distribution(running: Running, tmp_path: Path) -> None:
    """Each block has the candidates of its own row."""
    of_rows = [[*DRAFT, *range(10 + 6 * row, 16 + 6 * row)] for row in range(3)]
    ids_BKM = torch.tensor(of_rows, dtype=torch.int32)[:, None].expand(3, len(DRAFT), 8).contiguous()
    probs_BKM = torch.rand(3, len(DRAFT), 8, generator=torch.Generator().manual_seed(4))
    probs_BKM /= probs_BKM.sum(-1, keepdim=True)
    probs_BKV = torch.zeros(3, len(DRAFT), VOCAB).scatter_(2, ids_BKM.long(), probs_BKM)
    found = []
    for q in ((probs_BKV, None), (probs_BKM, ids_BKM)):
        async with running(shared_memory=str(tmp_path)) as verifier, told(verifier, tmp_path) as draft:
            client = verifier.client()
            for name in "abc":
                await client.start(name, prompt_of(9, ord(name) % 3), SAMPLED, "draft")
            waiting = asyncio.create_task(of_three(client, 1))
            await draft.guess(q[0], ids_BKM=q[1])
            found.append([(result.drafted, outcome(result)) for result in await waiting])
    assert [drafted for drafted, _ in found[0]] == [2, 2, 2]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        *(([2, 2, VOCAB], 6), ([6, VOCAB], 6), ([3, 1, 2 * VOCAB], 6), ([3, 2, 2**31], 6), ([], 6)),
        *(([3, 2, VOCAB], tokens) for tokens in (0, 3, 5, 9)),
    ],
)
async def test_guesses_and_q_that_do_not_fit_the_order_are_decoded_plainly(
    running: Running, tmp_path: Path, shape: list[int], tokens: int
) -> None:
    sound_BKV = torch.full((3, len(DRAFT), VOCAB), 1 / VOCAB)
    async with running(shared_memory=str(tmp_path)) as verifier, told(verifier, tmp_path) as draft:
        client = verifier.client()
        for name in "abc":
            await client.start(name, prompt_of(9), SAMPLED, "draft")
        first = asyncio.create_task(of_three(client, 1))
        await draft.guess(sound_BKV, shape, tokens)
        results = await first
        assert [result.undrafted for result in results] == [pb.UNDRAFTED_ERROR] * 3
        assert [(result.status.code, len(result.tokens)) for result in results] == [(codes.CODE_OK, 1)] * 3
        second = asyncio.create_task(of_three(client, 2))
        await draft.guess(sound_BKV)
        assert [result.drafted for result in await second] == [2, 2, 2], "it is asked again"


async def test_q_of_all_that_has_been_overwritten_leaves_empty_blocks(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, told(verifier, tmp_path) as draft:
        client = verifier.client()
        for name in "abc":
            await client.start(name, prompt_of(9), SAMPLED, "draft")
        waiting = asyncio.create_task(of_three(client, 1))
        write = draft.ring.put

        def put_and_overwritten(x: Tensor) -> pb.RingSlice:
            place = write(x)
            for _ in range(8):
                write(torch.zeros(draft.ring.size // 4, dtype=torch.uint8))
            return place

        draft.ring.put = put_and_overwritten  # type: ignore[method-assign]
        await draft.guess(torch.full((3, len(DRAFT), VOCAB), 1 / VOCAB))
        assert [(result.status.code, result.drafted) for result in await waiting] == [(codes.CODE_OK, 0)] * 3
