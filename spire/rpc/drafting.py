"""The gRPC surface of whatever drafts, in a process of its own or in the verifier's: translate, one call, back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import grpc
import structlog
import torch

from spire.drafting import MAX_SPECULATION_DEPTH, Drafted, Guess, ProposeAnswer, ProposeTask
from spire.errors import InvalidRequest, RequestError
from spire.rpc.errors import OK, call_status, item_status
from spire.rpc.limits import check_named
from spire.rpc.sampling import check_sampling, from_protos
from spire.rpc.tensors import put
from spire.v1 import draft_pb2 as pb
from spire.v1 import draft_pb2_grpc as rpc
from spire.v1 import tensor_pb2, verifier_pb2

log = structlog.get_logger()

Propose = Callable[[ProposeTask], Awaitable[ProposeAnswer]]


class DraftServicer(rpc.DraftServicer):
    """Serves `spire.v1.Draft`. `propose` hands a task to the thread that owns the model."""

    def __init__(
        self,
        info: Callable[[], pb.DraftGetInfoResponse],
        propose: Propose,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ):
        self._info, self._hand_over, self._vocab_size, self._device = info, propose, vocab_size, device

    async def GetInfo(
        self, request: pb.DraftGetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.DraftGetInfoResponse:
        return self._info()

    async def Rounds(
        self, requests: AsyncIterator[pb.ProposeBatch], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProposeBatchResult]:
        await context.send_initial_metadata(())  # the stream stands before anything is asked
        async for batch in requests:
            try:
                check_named("a ProposeBatch", len(batch.items))
            except InvalidRequest as error:
                await context.abort(call_status(error), str(error))
            yield await self._propose(batch)

    async def _propose(self, batch: pb.ProposeBatch) -> pb.ProposeBatchResult:
        began = time.monotonic()
        refused = self._refusals(batch)
        good = [item for item in batch.items if item.sequence_id not in refused]
        _log_refusals(refused)
        result = pb.ProposeBatchResult(batch_id=batch.batch_id)
        if good:
            task = ProposeTask(
                [Guess(item.sequence_id, item.base, item.newest_token) for item in good],
                from_protos([item.sampling for item in good], self._device),
                max(item.k for item in good),
            )
            answer = await self._hand_over(task)
            _log_refusals({good[index].sequence_id: error for index, error in answer.refused.items()})
            _add_proposals(result, good, answer)
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
        for item in batch.items:
            try:
                if item.sequence_id in seen:
                    raise InvalidRequest(f"sequence {item.sequence_id!r} occurs twice in a batch")
                seen.add(item.sequence_id)
                if item.k > MAX_SPECULATION_DEPTH:
                    raise InvalidRequest(f"k is {item.k}, at most {MAX_SPECULATION_DEPTH} can be drafted")
                if item.newest_token >= self._vocab_size:
                    raise InvalidRequest(
                        f"newest_token is {item.newest_token}, the vocabulary ends at {self._vocab_size}"
                    )
                check_sampling(item.sampling)
            except RequestError as error:
                refused[item.sequence_id] = error
        return refused


def _log_refusals(refused: Mapping[str, RequestError]) -> None:
    for sequence_id, error in refused.items():
        log.debug("refused", sequence=sequence_id, code=type(error).__name__)


def _add_proposals(result: pb.ProposeBatchResult, items: list[pb.ProposeItem], answer: ProposeAnswer) -> None:
    """Filled in place: q is the bulk of it."""
    for index, error in answer.refused.items():
        result.proposals.add(sequence_id=items[index].sequence_id, status=item_status(error))
    tokens = answer.drafted.tokens_BK.tolist() if answer.drafted else []
    for row, index in enumerate(answer.ready):
        item = items[index]
        proposal = result.proposals.add(sequence_id=item.sequence_id, status=OK)
        if answer.drafted:
            proposal.tokens.extend(tokens[row][: item.k])
            if item.k and item.sampling.temperature > 0 and item.sampling.rule != tensor_pb2.RULE_INVARIANT:
                _put_q(proposal.q, answer.drafted, row, item.k)


def _put_q(q: verifier_pb2.DraftDistribution, drafted: Drafted, row: int, k: int) -> None:
    assert drafted.probs_BKM is not None  # there is a sequence that is not under the invariant rule
    if drafted.ids_BKM is not None:
        put(q.ids, drafted.ids_BKM[row, :k].int())
    put(q.probabilities, drafted.probs_BKM[row, :k])
