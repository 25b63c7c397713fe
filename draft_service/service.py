"""The draft's gRPC surface: translate, one call of the domain, translate back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import structlog

from draft_service.activations import Follower
from draft_service.drafter import Drafted, Guess
from draft_service.worker import ProposeAnswer, ProposeTask, Worker
from spire.errors import InvalidRequest, RequestError
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.errors import OK, item_status
from spire.rpc.sampling import check_sampling, from_protos
from spire.rpc.tensors import to_wire
from spire.v1 import draft_pb2 as pb
from spire.v1 import draft_pb2_grpc as rpc
from spire.v1 import verifier_pb2

MAX_SPECULATION_DEPTH = 16

log = structlog.get_logger()


@dataclass(frozen=True)
class Identity:
    """What the handshake tells about this draft."""

    draft_id: str
    model_name: str
    target_fingerprint: str
    tokenizer_hash: str


class DraftService(rpc.DraftServicer):
    """Serves `spire.v1.Draft`. State lives in the worker."""

    def __init__(self, identity: Identity, worker: Worker, follower: Follower):
        self._identity, self._worker, self._follower = identity, worker, follower

    async def GetInfo(
        self, request: pb.DraftGetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.DraftGetInfoResponse:
        drafter = self._worker.drafter
        return pb.DraftGetInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            draft_id=self._identity.draft_id,
            kind=drafter.draft.draft.kind,
            model_name=self._identity.model_name,
            target_fingerprint=self._identity.target_fingerprint,
            tokenizer_hash=self._identity.tokenizer_hash,
            vocab_size=drafter.draft.config.vocab_size,
            max_speculation_depth=MAX_SPECULATION_DEPTH,
            state_bytes_per_sequence=drafter.memory.bytes_per_sequence(),
            max_sequences=drafter.memory.slots,
            following=self._follower.following,
        )

    async def Rounds(
        self, requests: AsyncIterator[pb.ProposeBatch], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProposeBatchResult]:
        async for batch in requests:
            yield await self._propose(batch)

    async def _propose(self, batch: pb.ProposeBatch) -> pb.ProposeBatchResult:
        began = time.monotonic()
        refused = self._refusals(batch)
        good = [item for item in batch.items if item.sequence_id not in refused]
        result = pb.ProposeBatchResult(batch_id=batch.batch_id)
        if good:
            task = ProposeTask(
                [Guess(item.sequence_id, item.base, item.newest_token) for item in good],
                from_protos([item.sampling for item in good], self._worker.drafter.device),
                max(item.k for item in good),
            )
            answer = await self._worker.propose(task)
            result.proposals.extend(_proposals(good, answer))
            result.timings.queue_seconds = answer.queue_seconds
            result.timings.forward_seconds = answer.forward_seconds
        result.proposals.extend(
            pb.Proposal(sequence_id=sequence_id, status=item_status(error)) for sequence_id, error in refused.items()
        )
        result.timings.total_seconds = time.monotonic() - began - result.timings.queue_seconds
        return result

    def _refusals(self, batch: pb.ProposeBatch) -> dict[str, RequestError]:
        """Items that are wrong by themselves, with the reason."""
        refused: dict[str, RequestError] = {}
        seen: set[str] = set()
        vocabulary = self._worker.drafter.draft.config.vocab_size
        for item in batch.items:
            try:
                if item.sequence_id in seen:
                    raise InvalidRequest(f"sequence {item.sequence_id!r} occurs twice in a batch")
                seen.add(item.sequence_id)
                if item.k > MAX_SPECULATION_DEPTH:
                    raise InvalidRequest(f"k is {item.k}, at most {MAX_SPECULATION_DEPTH} can be drafted")
                if item.newest_token >= vocabulary:
                    raise InvalidRequest(f"newest_token is {item.newest_token}, the vocabulary ends at {vocabulary}")
                check_sampling(item.sampling)
            except RequestError as error:
                refused[item.sequence_id] = error
        return refused


def _proposals(items: list[pb.ProposeItem], answer: ProposeAnswer) -> list[pb.Proposal]:
    proposals = [
        pb.Proposal(sequence_id=items[index].sequence_id, status=item_status(error))
        for index, error in answer.refused.items()
    ]
    if answer.drafted is None:
        ready = [pb.Proposal(sequence_id=items[index].sequence_id, status=OK) for index in answer.ready]
        return proposals + ready
    tokens = answer.drafted.tokens_BK.tolist()
    for row, index in enumerate(answer.ready):
        item = items[index]
        q = None if item.sampling.temperature == 0 or not item.k else _distribution(answer.drafted, row, item.k)
        proposals.append(pb.Proposal(sequence_id=item.sequence_id, status=OK, tokens=tokens[row][: item.k], q=q))
    return proposals


def _distribution(drafted: Drafted, row: int, k: int) -> verifier_pb2.DraftDistribution:
    ids = None if drafted.ids_BKM is None else to_wire(drafted.ids_BKM[row, :k].int())
    return verifier_pb2.DraftDistribution(ids=ids, probabilities=to_wire(drafted.probs_BKM[row, :k]))
