"""Conversion of a DraftRequest into a task for the model, and of the model's result into a DraftReply."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import chain, compress, zip_longest
from typing import NamedTuple

import structlog
from torch import Tensor

from draft_service.drafter import Drafter
from draft_service.worker import DraftResult, DraftTask
from spire.decoding.drafting import MAX_SPECULATION_DEPTH, Drafted, DraftItem
from spire.decoding.sampling import SamplingRows, Share
from spire.errors import InvalidRequest, RequestError
from spire.rpc.carrier import CARRIERS, INLINE
from spire.rpc.channel import MAX_MESSAGE_BYTES
from spire.rpc.errors import OK, item_status
from spire.rpc.sampling import check_sampling, from_protos
from spire.rpc.tensors import put, put_shape
from spire.v1 import draft_pb2 as pb, tensor_pb2, verifier_pb2

# The most bytes of q that a reply carries: a message of more than MAX_MESSAGE_BYTES would break the stream.
MOST_Q_BYTES = MAX_MESSAGE_BYTES - (1 << 20)

log = structlog.get_logger()


class ParsedRequest(NamedTuple):
    """The valid items of a request with their k (`depths`), the refused items, and the task if any item is valid."""

    batch_id: int
    began: float
    items: list[DraftItem]
    depths: list[int]
    refused: dict[str, RequestError]
    task: DraftTask | None


class PlacedQ(NamedTuple):
    """The q of a round, [B, k, m], and the slices of the q ring that hold it; without slices, it lies on the host.

    `ids`: the tokens of q, [B, k, m], or [m] if they are the same everywhere; None: the whole vocabulary.
    """

    probs_BKM: Tensor
    ids: Tensor | None
    of_probs: verifier_pb2.RingSlice | None = None
    of_ids: verifier_pb2.RingSlice | None = None


class Replies:
    """Parses draft requests and builds replies."""

    def __init__(self, drafter: Drafter):
        self._drafter, self._vocab_size = drafter, drafter.draft.config.vocab_size
        # Sequence ids and sampling rows of the last request without refusals. The next request usually names the same
        # sequences, and the sampling parameters of a sequence never change.
        self._last: tuple[tuple[str, ...], SamplingRows | None] = ((), None)
        # Bytes of q sent, by carrier.
        self.q_bytes = dict.fromkeys(CARRIERS, 0)

    def parsed(self, request: pb.DraftRequest) -> ParsedRequest:
        began = time.monotonic()
        # Read each field once: an attribute of a message takes longer than one of an object.
        wanted = list(request.items)
        items = [DraftItem(item.sequence_id, item.base, item.newest_token, item.least_standing) for item in wanted]
        depths = [item.k for item in wanted]
        sequence_ids = tuple([item.sequence_id for item in items])
        known, rows = self._last
        if known != sequence_ids:
            rows = None
        refused: dict[str, RequestError] = {}
        seen: set[str] = set()
        # The sampling parameters in known rows are valid.
        wishes = [item.sampling for item in wanted] if rows is None else []
        for item, k, wish in zip_longest(items, depths, wishes):
            try:
                if item.sequence_id in seen:
                    raise InvalidRequest(f"sequence {item.sequence_id!r} occurs twice in a batch")
                seen.add(item.sequence_id)
                if k > MAX_SPECULATION_DEPTH:
                    raise InvalidRequest(f"k is {k}, at most {MAX_SPECULATION_DEPTH} can be drafted")
                if item.newest_token >= self._vocab_size:
                    raise InvalidRequest(
                        f"newest_token is {item.newest_token}, the vocabulary ends at {self._vocab_size}"
                    )
                if wish is not None:
                    check_sampling(wish)
            except RequestError as error:
                refused[item.sequence_id] = error
        if refused:
            _log_refusals(refused)
            sound = [item.sequence_id not in refused for item in items]
            wanted, items, depths = (list(compress(each, sound)) for each in (wanted, items, depths))
        task = None
        if items:
            if rows is None or refused:
                rows = from_protos([item.sampling for item in wanted], self._drafter.device)
            if not refused:
                self._last = sequence_ids, rows
            task = DraftTask(items, rows, max(depths))
        return ParsedRequest(request.batch_id, began, items, depths, refused, task)

    def to(self, parsed: ParsedRequest, result: DraftResult | None) -> pb.DraftReply:
        """Return the reply to a request; `result` is None if nothing was drafted."""
        reply = pb.DraftReply(batch_id=parsed.batch_id)
        if result and parsed.task:
            _log_refusals({parsed.items[index].sequence_id: error for index, error in result.refused.items()})
            q = self._placed(result.drafted) if parsed.task.rows.mix.judged_by_q is not Share.NONE else None
            if not _add_uniform(reply, parsed, result, q):
                self.q_bytes[INLINE] += _add_items(reply, parsed, result, parsed.task.rows, q)
            reply.timings.queue_seconds = result.queue_seconds
            reply.timings.forward_seconds = result.forward_seconds
        for sequence_id, error in parsed.refused.items():
            reply.items.add(sequence_id=sequence_id, status=item_status(error))
        reply.timings.total_seconds = time.monotonic() - parsed.began - reply.timings.queue_seconds
        return reply

    def _placed(self, drafted: Drafted | None) -> PlacedQ | None:
        """Write q to the ring, unless it is there; if there is no ring or no room, copy it to the host."""
        if drafted is None or drafted.probs_BKM is None:
            return None
        ring, probs_BKM = self._drafter.q_ring(), drafted.probs_BKM
        ids = drafted.vocabulary_M if drafted.ids_BKM is None else drafted.ids_BKM
        ids = None if ids is None else ids.int()
        size = probs_BKM.nbytes + (0 if ids is None else ids.nbytes)
        if ring:
            of_probs = drafted.place or ring.put(probs_BKM)
            of_ids = verifier_pb2.RingSlice() if ids is None else ring.put(ids)
            if of_probs.length and (ids is None or of_ids.length):
                ring.settle()
                self.q_bytes[ring.carrier] += size
                return PlacedQ(probs_BKM, ids, of_probs, of_ids)
        return PlacedQ(probs_BKM.cpu(), None if ids is None else ids.cpu())


def _log_refusals(refused: Mapping[str, RequestError]) -> None:
    for sequence_id, error in refused.items():
        log.debug("refused", sequence=sequence_id, code=type(error).__name__)


def _add_uniform(reply: pb.DraftReply, parsed: ParsedRequest, result: DraftResult, q: PlacedQ | None) -> bool:
    """Add one reply for all items. Return False, adding none, if k differs, items failed, or q is not in the ring."""
    drafted = result.drafted
    if drafted is None or parsed.refused or result.refused or len(set(parsed.depths)) > 1:
        return False
    if q:
        if q.of_probs is None:
            return False
        put_shape(reply.uniform.q.probabilities, q.probs_BKM.dtype, q.probs_BKM.shape)
        reply.uniform.q.probabilities_slice.CopyFrom(q.of_probs)
        if q.ids is not None and q.of_ids:
            put_shape(reply.uniform.q.ids, q.ids.dtype, q.ids.shape)
            reply.uniform.q.ids_slice.CopyFrom(q.of_ids)
    reply.uniform.tokens.extend(chain.from_iterable(drafted.tokens_BK.tolist()))
    if drafted.counts_B is not None:
        reply.uniform.counts.extend(drafted.counts_B.tolist())
    return True


def _add_items(
    reply: pb.DraftReply, parsed: ParsedRequest, result: DraftResult, rows: SamplingRows, q: PlacedQ | None
) -> int:
    """Add one reply per item, and return the bytes of q that are in the reply itself.

    Messages are filled in place, without a copy, because q is large if sent inline.
    """
    for index, error in result.refused.items():
        reply.items.add(sequence_id=parsed.items[index].sequence_id, status=item_status(error))
    stopped = result.drafted.counts_B if result.drafted else None
    counts = [MAX_SPECULATION_DEPTH] * len(result.ready) if stopped is None else stopped.tolist()
    most = _depth_that_fits(q)
    ready = [
        (parsed.items[index].sequence_id, min(parsed.depths[index], count, most))
        for index, count in zip(result.ready, counts, strict=True)
    ]
    added = [reply.items.add(sequence_id=sequence_id, status=OK) for sequence_id, _ in ready]
    if result.drafted is None:
        return 0
    for item, (_, k), tokens in zip(added, ready, result.drafted.tokens_BK.tolist(), strict=True):
        item.tokens.extend(tokens[:k])
    if q is None:
        return 0
    for row, judged in enumerate(rows.judged_by_q_B[result.ready].tolist()):
        if judged and (k := ready[row][1]):
            message = added[row].q
            _put(message.probabilities, message.probabilities_slice, q.probs_BKM, q.of_probs, row, k)
            if q.ids is not None:
                _put(message.ids, message.ids_slice, q.ids, q.of_ids, row, k)
    return 0 if q.of_probs else sum(item.q.ByteSize() for item in added)


def _depth_that_fits(q: PlacedQ | None) -> int:
    """Return the number of tokens of each sequence whose q fits into one reply. The rest is not sent."""
    if q is None or q.of_probs:
        return MAX_SPECULATION_DEPTH
    of_all, of_a_token = 0, q.probs_BKM[:, :1].nbytes
    if q.ids is not None and q.ids.ndim == 1:
        of_all = q.ids.nbytes * len(q.probs_BKM)
    elif q.ids is not None:
        of_a_token += q.ids[:, :1].nbytes
    return max(0, (MOST_Q_BYTES - of_all) // of_a_token)


def _put(
    message: tensor_pb2.Tensor,
    place: verifier_pb2.RingSlice,
    numbers: Tensor,
    batch: verifier_pb2.RingSlice | None,
    row: int,
    k: int,
) -> None:
    """Write the first k of a row of `numbers` [B, K, M] to `message`, or all of `numbers` [M], which every row shares.

    If they lie in the ring at `batch`, write only their `place`.
    """
    shared = numbers.ndim == 1
    if batch is None:
        put(message, numbers if shared else numbers[row, :k])
        return
    if shared:
        put_shape(message, numbers.dtype, numbers.shape)
        place.CopyFrom(batch)
        return
    B, K, M = numbers.shape
    put_shape(message, numbers.dtype, (k, M))
    of_row = batch.length // B
    place.position, place.length = batch.position + row * of_row, of_row // K * k
