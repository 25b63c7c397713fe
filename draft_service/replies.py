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
from spire.rpc.carrier import OverwritingRing
from spire.rpc.errors import OK, item_status
from spire.rpc.sampling import check_sampling, from_protos
from spire.rpc.tensors import put, put_shape
from spire.v1 import draft_pb2 as pb, tensor_pb2, verifier_pb2

log = structlog.get_logger()


class ParsedRequest(NamedTuple):
    """The valid items of a request with their k (`depths`), the refused items, and the task if any item is valid."""

    batch_id: int
    began: float
    items: list[DraftItem]
    depths: list[int]
    refused: dict[str, RequestError]
    task: DraftTask | None


class Replies:
    """Parses draft requests and builds replies."""

    def __init__(self, drafter: Drafter):
        self._drafter, self._vocab_size = drafter, drafter.draft.config.vocab_size
        # Sequence ids and sampling rows of the last request without refusals. The next request usually names the same
        # sequences, and the sampling parameters of a sequence never change.
        self._last: tuple[tuple[str, ...], SamplingRows | None] = ((), None)

    def parsed(self, request: pb.DraftRequest) -> ParsedRequest:
        began = time.monotonic()
        # Read each field once: an attribute of a message takes longer than one of an object.
        wanted = list(request.items)
        items = [DraftItem(item.sequence_id, item.base, item.newest_token) for item in wanted]
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
            ring = self._drafter.q_ring()
            if not _add_uniform(reply, parsed, result, ring):
                _add_items(reply, parsed, result, parsed.task.rows, ring)
            reply.timings.queue_seconds = result.queue_seconds
            reply.timings.forward_seconds = result.forward_seconds
        for sequence_id, error in parsed.refused.items():
            reply.items.add(sequence_id=sequence_id, status=item_status(error))
        reply.timings.total_seconds = time.monotonic() - parsed.began - reply.timings.queue_seconds
        return reply


def _log_refusals(refused: Mapping[str, RequestError]) -> None:
    for sequence_id, error in refused.items():
        log.debug("refused", sequence=sequence_id, code=type(error).__name__)


def _add_uniform(
    reply: pb.DraftReply, parsed: ParsedRequest, result: DraftResult, ring: OverwritingRing | None
) -> bool:
    """Add one reply for all items. Return False, adding none, if k or rules differ, items failed, or q has no room."""
    drafted = result.drafted
    if parsed.refused or result.refused or len(set(parsed.depths)) > 1:
        return False
    if parsed.task is None or drafted is None or drafted.ids_BKM is not None:
        return False
    judged, probs_BKM = parsed.task.rows.mix.judged_by_q, drafted.probs_BKM
    if judged is not Share.NONE:
        if judged is Share.SOME or probs_BKM is None or ring is None:
            return False
        place = drafted.place or ring.put(probs_BKM)
        if not place.length:
            return False
        put_shape(reply.uniform.q.probabilities, probs_BKM.dtype, probs_BKM.shape)
        reply.uniform.q.probabilities_slice.CopyFrom(place)
    reply.uniform.tokens.extend(chain.from_iterable(drafted.tokens_BK.tolist()))
    return True


def _add_items(
    reply: pb.DraftReply, parsed: ParsedRequest, result: DraftResult, rows: SamplingRows, ring: OverwritingRing | None
) -> None:
    """Add one reply per item. Messages are filled in place, without a copy, because q is large if sent inline."""
    for index, error in result.refused.items():
        reply.items.add(sequence_id=parsed.items[index].sequence_id, status=item_status(error))
    ready = [(parsed.items[index].sequence_id, parsed.depths[index]) for index in result.ready]
    added = [reply.items.add(sequence_id=sequence_id, status=OK) for sequence_id, _ in ready]
    if result.drafted is None:
        return
    for item, (_, k), tokens in zip(added, ready, result.drafted.tokens_BK.tolist(), strict=True):
        item.tokens.extend(tokens[:k])
    judged = rows.judged_by_q_B[result.ready].tolist()
    sampled = [(row, added[row].q, k) for row, (_, k) in enumerate(ready) if judged[row] and k]
    if sampled:
        _add_q(sampled, result.drafted, ring)


def _add_q(
    sampled: list[tuple[int, verifier_pb2.DraftDistribution, int]], drafted: Drafted, ring: OverwritingRing | None
) -> None:
    """Write the first k distributions of a row to its message, for each (row, message, k) in `sampled`."""
    assert drafted.probs_BKM is not None  # at least one sequence is not under the invariant rule
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
    """Write a row's first k distributions to `message`; if all rows lie in the ring at `batch`, only its `place`."""
    if not batch.length:
        put(message, numbers_BKM[row, :k])
        return
    B, K, M = numbers_BKM.shape
    put_shape(message, numbers_BKM.dtype, (k, M))
    of_row = batch.length // B
    place.position, place.length = batch.position + row * of_row, of_row // K * k
