"""q in memory that the draft shares: a block is verified as if it had brought it, and as an empty one if it is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spire.rpc.carrier import OverwritingRing
from spire.rpc.tensors import without_data
from spire.v1 import tensor_pb2 as codes
from spire.v1 import verifier_pb2 as pb
from tests.verifier.conftest import Running
from tests.verifier.harness import Client, Follower, distribution, prompt_of
from verifier_service import blocks
from verifier_service.batch import RaggedBatch, pad

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
        ids_slice=ring.put(ids_KM),
        probabilities=without_data(probs_KM),
        probabilities_slice=ring.put(probs_KM),
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
        wrong.probabilities_slice.CopyFrom(ring.put(guess()[1] * 1.01))
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
            ring.put(torch.zeros(ring.size // 4, dtype=torch.uint8))
        assert outcome(await verified(client, "overwritten", q)) == plain
        q = placed(ring)
        second = await verifier.follower(shared_memory=tmp_path)
        await followed(second)
        assert outcome(await verified(client, "earlier", q)) == plain
        await second.close()
        assert outcome(await verified(client, "left", q)) == plain


async def test_a_block_whose_q_is_overwritten_while_it_is_read_is_verified_as_an_empty_one(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        ring, client = await followed(await verifier.follower(shared_memory=tmp_path)), verifier.client()
        plain = outcome(await verified(client, "plain", None))

        def pad_slowly(*arguments: Any) -> RaggedBatch:
            batch = pad(*arguments)
            for _ in range(8):
                ring.put(torch.zeros(ring.size // 4, dtype=torch.uint8))
            return batch

        monkeypatch.setattr(blocks, "pad", pad_slowly)
        assert outcome(await verified(client, "overwritten", placed(ring))) == plain


async def test_a_place_of_another_size_than_its_numbers_is_refused(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        ring, client = await followed(await verifier.follower(shared_memory=tmp_path)), verifier.client()
        q = placed(ring)
        q.ids_slice.length = 4
        result = await verified(client, "a", q)
        assert result.status.code == codes.CODE_INVALID_ARGUMENT
        assert "needs 64 bytes, 4 came" in result.status.message
