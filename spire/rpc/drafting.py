"""The gRPC surface of whatever drafts, in a process of its own or in the verifier's: translate, one call, back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import chain, compress, zip_longest

import grpc
import structlog
import torch
from torch import Tensor

from spire.drafting import MAX_SPECULATION_DEPTH, Drafted, Guess, ProposeAnswer, ProposeTask
from spire.errors import InvalidRequest, RequestError, SpireError
from spire.rpc.carrier import OverwritingRing
from spire.rpc.errors import OK, call_status, item_status
from spire.rpc.limits import check_named
from spire.rpc.sampling import check_sampling, from_protos
from spire.rpc.tensors import put, put_shape
from spire.sampling import SamplingRows, Share
from spire.v1 import draft_pb2 as pb
from spire.v1 import draft_pb2_grpc as rpc
from spire.v1 import tensor_pb2, verifier_pb2

log = structlog.get_logger()

Propose = Callable[[ProposeTask], Awaitable[ProposeAnswer]]
# The gateway that a call is of. Raises SpireError where it is not.
Asker = Callable[[grpc.aio.ServicerContext], str]


@dataclass(frozen=True)
class Asked:
    """A batch as it was asked for: sound items and how many tokens each wants, those refused, and the model's work."""

    batch_id: int
    began: float
    guesses: list[Guess]
    depths: list[int]
    refused: dict[str, RequestError]
    task: ProposeTask | None

    @property
    def alike(self) -> bool:
        """Whether of every item, none of them refused, as many tokens are wanted."""
        return not self.refused and len(set(self.depths)) == 1


class DraftServicer(rpc.DraftServicer):
    """Serves `spire.v1.Draft`. `propose` hands a task to the thread that owns the model; `q_ring` is where the verifier
    reads q, if that is on this host."""

    def __init__(
        self,
        info: Callable[[], pb.DraftGetInfoResponse],
        propose: Propose,
        vocab_size: int,
        device: torch.device | str = "cpu",
        q_ring: Callable[[], OverwritingRing | None] = lambda: None,
        asker: Asker = lambda _: "",
    ):
        self._info, self._hand_over, self._vocab_size, self._device = info, propose, vocab_size, device
        self._q_ring, self._asker = q_ring, asker
        # How the last sound batch was sampled, or of which sequences it was, and its rows: as a rule the next one is
        # the same again. One attribute, of several threads.
        self._last: tuple[tuple[str | bytes, ...], SamplingRows | None] = ((), None)

    async def GetInfo(
        self, request: pb.DraftGetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.DraftGetInfoResponse:
        return self._info()

    async def Rounds(
        self, requests: AsyncIterator[pb.ProposeBatch], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProposeBatchResult]:
        try:
            asker = self._asker(context)
            await context.send_initial_metadata(())  # the stream stands before anything is asked
            async for batch in requests:
                check_named("a ProposeBatch", len(batch.items))
                yield await self.answer(batch, asker)
        except SpireError as error:
            await context.abort(call_status(error), str(error))

    async def answer(self, batch: pb.ProposeBatch, asker: str = "") -> pb.ProposeBatchResult:
        asked = self.asked(batch)
        if asked.task:
            asked.task.asker = asker
        return self.answered(asked, await self._hand_over(asked.task) if asked.task else None)

    def asked(self, batch: pb.ProposeBatch, of_verifier: bool = False) -> Asked:
        """What a batch asks of the model. `of_verifier`: where a sequence is sampled in one way for as long as it
        lives."""
        began = time.monotonic()
        # Read once: an attribute of a message takes longer than one of an object.
        items = list(batch.items)
        guesses = [Guess(item.sequence_id, item.base, item.newest_token) for item in items]
        depths = [item.k for item in items]
        if of_verifier:
            wishes: tuple[str | bytes, ...] = tuple([guess.sequence_id for guess in guesses])
        else:
            wishes = tuple([item.sampling.SerializeToString() for item in items])
        known, rows = self._last
        if known != wishes:
            rows = None
        refused = self._refusals(guesses, depths, [item.sampling for item in items] if rows is None else [])
        if refused:
            _log_refusals(refused)
            sound = [guess.sequence_id not in refused for guess in guesses]
            items, guesses, depths = (list(compress(each, sound)) for each in (items, guesses, depths))
        task = None
        if guesses:
            if rows is None or refused:
                rows = from_protos([item.sampling for item in items], self._device)
            if not refused:
                self._last = wishes, rows
            task = ProposeTask(guesses, rows, max(depths))
        return Asked(batch.batch_id, began, guesses, depths, refused, task)

    def answered(self, asked: Asked, answer: ProposeAnswer | None, together: bool = False) -> pb.ProposeBatchResult:
        """What is said to whoever asked. `together`: of all at once, where it can be."""
        result = pb.ProposeBatchResult(batch_id=asked.batch_id)
        if answer and asked.task:
            _log_refusals({asked.guesses[index].sequence_id: error for index, error in answer.refused.items()})
            if not (together and _add_guesses(result, asked, answer, self._q_ring())):
                _add_proposals(result, asked, answer, asked.task.rows, self._q_ring())
            result.timings.queue_seconds = answer.queue_seconds
            result.timings.forward_seconds = answer.forward_seconds
        result.proposals.extend(
            pb.Proposal(sequence_id=sequence_id, status=item_status(error))
            for sequence_id, error in asked.refused.items()
        )
        result.timings.total_seconds = time.monotonic() - asked.began - result.timings.queue_seconds
        return result

    def _refusals(
        self, guesses: list[Guess], depths: list[int], wishes: list[tensor_pb2.Sampling]
    ) -> dict[str, RequestError]:
        """Items that are wrong by themselves, with the reason. No wishes: they are known to be sound."""
        refused: dict[str, RequestError] = {}
        seen: set[str] = set()
        for guess, k, wish in zip_longest(guesses, depths, wishes):
            try:
                if guess.sequence_id in seen:
                    raise InvalidRequest(f"sequence {guess.sequence_id!r} occurs twice in a batch")
                seen.add(guess.sequence_id)
                if k > MAX_SPECULATION_DEPTH:
                    raise InvalidRequest(f"k is {k}, at most {MAX_SPECULATION_DEPTH} can be drafted")
                if guess.newest_token >= self._vocab_size:
                    raise InvalidRequest(
                        f"newest_token is {guess.newest_token}, the vocabulary ends at {self._vocab_size}"
                    )
                if wish is not None:
                    check_sampling(wish)
            except RequestError as error:
                refused[guess.sequence_id] = error
        return refused


def _log_refusals(refused: Mapping[str, RequestError]) -> None:
    for sequence_id, error in refused.items():
        log.debug("refused", sequence=sequence_id, code=type(error).__name__)


def _add_guesses(
    result: pb.ProposeBatchResult, asked: Asked, answer: ProposeAnswer, ring: OverwritingRing | None
) -> bool:
    """All that was asked for at once. False, and nothing is added, where items differ or q lies nowhere."""
    drafted = answer.drafted
    if not asked.alike or asked.task is None or drafted is None or drafted.ids_BKM is not None or answer.refused:
        return False
    judged, probs_BKM = asked.task.rows.judged_by_q, drafted.probs_BKM
    if judged is not Share.NONE:
        if judged is Share.SOME or probs_BKM is None or ring is None:
            return False
        place = drafted.place or ring.put(probs_BKM)
        if not place.length:
            return False
        put_shape(result.guesses.q.probabilities, probs_BKM.dtype, probs_BKM.shape)
        result.guesses.q.probabilities_slice.CopyFrom(place)
    result.guesses.tokens.extend(chain.from_iterable(drafted.tokens_BK.tolist()))
    return True


def _add_proposals(
    result: pb.ProposeBatchResult,
    asked: Asked,
    answer: ProposeAnswer,
    rows: SamplingRows,
    ring: OverwritingRing | None,
) -> None:
    """Filled in place: q is the bulk of it, where it does not lie in the ring."""
    for index, error in answer.refused.items():
        result.proposals.add(sequence_id=asked.guesses[index].sequence_id, status=item_status(error))
    ready = [(asked.guesses[index].sequence_id, asked.depths[index]) for index in answer.ready]
    added = [result.proposals.add(sequence_id=sequence_id, status=OK) for sequence_id, _ in ready]
    if answer.drafted is None:
        return
    for proposal, (_, k), tokens in zip(added, ready, answer.drafted.tokens_BK.tolist(), strict=True):
        proposal.tokens.extend(tokens[:k])
    judged = rows.judged_by_q_B[answer.ready].tolist()
    sampled = [(row, added[row].q, k) for row, (_, k) in enumerate(ready) if judged[row] and k]
    if sampled:
        _add_q(sampled, answer.drafted, ring)


def _add_q(
    sampled: list[tuple[int, verifier_pb2.DraftDistribution, int]], drafted: Drafted, ring: OverwritingRing | None
) -> None:
    """To rows of a batch, the first k of what their tokens were drawn from: (row, message, k)."""
    assert drafted.probs_BKM is not None  # there is a sequence that is not under the invariant rule
    in_ring = ring.put if ring else lambda _: verifier_pb2.RingSlice()
    if drafted.ids_BKM is not None:
        ids_BKM = drafted.ids_BKM.int()
        place = in_ring(ids_BKM)
        for row, q, k in sampled:
            _put(q.ids, q.ids_slice, ids_BKM, place, row, k)
    place = drafted.place if ring and drafted.place else in_ring(drafted.probs_BKM)
    for row, q, k in sampled:
        _put(q.probabilities, q.probabilities_slice, drafted.probs_BKM, place, row, k)


def _put(
    message: tensor_pb2.Tensor,
    place: verifier_pb2.RingSlice,
    numbers_BKM: Tensor,
    batch: verifier_pb2.RingSlice,
    row: int,
    k: int,
) -> None:
    """The first k of a row's distributions; `batch` is where all of them lie."""
    if not batch.length:
        put(message, numbers_BKM[row, :k])
        return
    B, K, M = numbers_BKM.shape
    put_shape(message, numbers_BKM.dtype, (k, M))
    of_row = batch.length // B
    place.position, place.length = batch.position + row * of_row, of_row // K * k
