"""Draft requests for waiting blocks, and the draft replies. Everything runs on the engine's thread.

The gateway chooses k, and the verifier knows the newest token. So the verifier asks a draft as soon as that token is
committed, and the draft replies to the verifier directly. A block whose draft reply is late or lost is decoded plainly.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import NamedTuple

from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.model.config import MAGICDEC
from spire.service.pace import Pace
from spire.v1 import draft_pb2, tensor_pb2, verifier_pb2 as pb
from verifier_service.engine.batch import Item, Limits, SharedQ, VerifyTask, read_q
from verifier_service.engine.drafts import Drafts
from verifier_service.engine.self_drafting import SelfDrafting, Wish
from verifier_service.engine.sequence import HeldSequence

# The longest timeout, in seconds, that a gateway may set for draft replies.
_MOST_PATIENCE = 60.0
# A draft that owes a reply for so many seconds, and does not say that it is working, has to connect again: the request
# or the reply may be lost.
_MOST_OWED_SECONDS = 10.0

# Copies the message before it returns: the next request may reuse the message with other numbers. None ends the stream.
Send = Callable[[draft_pb2.DraftRequest | None], None]


class OutstandingRequest(NamedTuple):
    """A draft request without a reply so far: the items of a batch to draft for, and the deadline of the reply."""

    draft_id: str
    task: VerifyTask
    items: list[Item]
    at: float
    deadline: float


class OwedReply(NamedTuple):
    """A reply that was late: the id of its request, and the time from which on it is lost."""

    request_id: int
    lost_at: float


class DraftRequests:
    """Sends draft requests and handles the replies. Notifies `drafts` when a draft becomes available or unavailable."""

    def __init__(self, sequences: Mapping[str, HeldSequence], limits: Limits, pace: Pace, self_drafting: SelfDrafting):
        self._sequences, self._limits, self._pace, self._self_drafting = sequences, limits, pace, self_drafting
        self.drafts: Drafts | None = None
        self._connected: dict[str, Send] = {}
        # draft id -> (sequences of the last request, its message): the next request is usually for the same sequences.
        self._last: dict[str, tuple[list[HeldSequence], draft_pb2.DraftRequest]] = {}
        self._under_way: dict[int, OutstandingRequest] = {}
        # draft id -> the last request whose reply was late: the draft is not asked again until it has replied.
        self._owed: dict[str, OwedReply] = {}
        self._ids = count(1)

    def connect(self, draft_id: str, send: Send) -> None:
        """Send this draft's requests with `send` from now on, and give up its outstanding requests as lost."""
        self._lose(draft_id)
        self._connected[draft_id] = send
        self._tell(draft_id)

    def disconnect(self, draft_id: str, send: Send) -> None:
        if self._connected.get(draft_id) == send:
            del self._connected[draft_id]
            self._last.pop(draft_id, None)
            self._lose(draft_id)
            self._tell(draft_id)

    def _tell(self, draft_id: str) -> None:
        if self.drafts:
            self.drafts.may_be_asked(draft_id, draft_id in self._connected and draft_id not in self._owed)

    def place(self, task: VerifyTask) -> None:
        """Send a batch's draft requests. The tokens of its sequences' previous blocks must have been appended."""
        by_draft: defaultdict[str, list[tuple[Item, HeldSequence]]] = defaultdict(list)
        for item in task.items:
            sequence = self._sequences.get(item.sequence_id) if item.k and not item.tokens else None
            if sequence and sequence.gateway == task.gateway and sequence.started and item.round == sequence.round + 1:
                by_draft[sequence.draft_id].append((item, sequence))
        for draft_id, asked in by_draft.items():
            if draft_id == MAGICDEC:
                self._self_drafting.ask(task, [Wish(item, one, self._depth(item, one)) for item, one in asked])
                continue
            items = [item for item, _ in asked]
            send = self._connected.get(draft_id)
            if send is None:
                _plainly(items, pb.UNDRAFTED_LOST)
            elif draft_id in self._owed:
                _plainly(items, pb.UNDRAFTED_OWING)
            else:
                send(self._request(draft_id, task, items, [sequence for _, sequence in asked]))

    def _request(
        self, draft_id: str, task: VerifyTask, items: list[Item], sequences: list[HeldSequence]
    ) -> draft_pb2.DraftRequest:
        now, request_id = time.perf_counter(), next(self._ids)
        patience = min(max(0.0, task.batch.patience_seconds), _MOST_PATIENCE)  # NaN becomes 0
        self._under_way[request_id] = OutstandingRequest(draft_id, task, items, now, now + patience)
        task.awaited += 1
        batch = self._message(draft_id, sequences)
        batch.batch_id, batch.step_seconds = request_id, self._pace.step_seconds
        for item, sequence, asked in zip(items, sequences, batch.items, strict=True):
            asked.base, asked.newest_token = len(sequence.tokens) - 1, sequence.newest
            asked.k = self._depth(item, sequence)
            asked.least_standing = item.least_standing
        return batch

    def _depth(self, item: Item, sequence: HeldSequence) -> int:
        room = self._limits.max_context - len(sequence.tokens)
        return max(0, min(item.k, self._limits.max_depth, MAX_SPECULATION_DEPTH, room))

    def _message(self, draft_id: str, sequences: list[HeldSequence]) -> draft_pb2.DraftRequest:
        """Return a request for these sequences; the caller sets the fields that change every round."""
        known, batch = self._last.get(draft_id, ([], draft_pb2.DraftRequest()))
        if len(known) != len(sequences) or not all(map(operator.is_, known, sequences)):
            asked = [draft_pb2.DraftRequestItem(sequence_id=one.id, sampling=one.start.sampling) for one in sequences]
            batch = draft_pb2.DraftRequest(items=asked)
            self._last[draft_id] = sequences, batch
        return batch

    def take(self, draft_id: str, reply: draft_pb2.DraftReply, received: float) -> None:
        """Handle a draft reply that arrived at time `received`. Ignore the reply if its request was given up."""
        if (owed := self._owed.get(draft_id)) and owed.request_id == reply.batch_id:
            del self._owed[draft_id]
            self._tell(draft_id)
        request = self._under_way.get(reply.batch_id)
        if request is None or request.draft_id != draft_id:
            return
        del self._under_way[reply.batch_id]
        task = request.task
        if reply.HasField("uniform"):
            _take_all_over(request, reply.uniform)
        else:
            replies = {drafted.sequence_id: drafted for drafted in reply.items}
            for item in request.items:
                _take_over(item, replies.get(item.sequence_id))
        task.awaited -= 1
        task.drafting_seconds = max(task.drafting_seconds, received - request.at)
        if reply.timings.forward_seconds >= task.drafting.forward_seconds:
            task.drafting.CopyFrom(reply.timings)

    def works(self, draft_id: str) -> None:
        """Note that a draft has received its request and works on it: the reply that it owes is late, but not lost."""
        if owed := self._owed.get(draft_id):
            self._owed[draft_id] = owed._replace(lost_at=time.perf_counter() + _MOST_OWED_SECONDS)

    def give_up_late(self) -> None:
        """Give up the requests whose deadline has passed: their blocks are decoded plainly.

        A draft whose late reply is lost is disconnected. It connects again, and can then be asked again.
        """
        now = time.perf_counter()
        for request_id in [i for i, request in self._under_way.items() if request.deadline <= now]:
            draft_id = self._under_way[request_id].draft_id
            self._owed[draft_id] = OwedReply(request_id, now + _MOST_OWED_SECONDS)
            self._give_up(request_id, pb.UNDRAFTED_LATE)
            self._tell(draft_id)
        for draft_id in [i for i, owed in self._owed.items() if owed.lost_at <= now]:
            send = self._connected[draft_id]  # a draft that leaves owes nothing
            send(None)
            self.disconnect(draft_id, send)

    @property
    def patience(self) -> float | None:
        """Seconds until the next deadline; None if no reply is awaited."""
        deadlines = [request.deadline for request in self._under_way.values()]
        deadlines += [owed.lost_at for owed in self._owed.values()]
        return max(0.0, min(deadlines) - time.perf_counter()) if deadlines else None

    def _lose(self, draft_id: str) -> None:
        self._owed.pop(draft_id, None)
        for request_id in [i for i, request in self._under_way.items() if request.draft_id == draft_id]:
            self._give_up(request_id, pb.UNDRAFTED_LOST)

    def _give_up(self, request_id: int, why: pb.Undrafted) -> None:
        request = self._under_way.pop(request_id)
        request.task.awaited -= 1
        request.task.drafting_seconds = max(request.task.drafting_seconds, time.perf_counter() - request.at)
        _plainly(request.items, why)


def _plainly(items: list[Item], why: pb.Undrafted) -> None:
    for item in items:
        item.undrafted = why


def _take_all_over(request: OutstandingRequest, uniform: draft_pb2.UniformReply) -> None:
    """Copy tokens and q of a reply with one k for all items. If the reply is invalid, its items are decoded plainly."""
    items, counts = request.items, list(uniform.counts)
    k, rest = divmod(len(uniform.tokens), len(items))
    fits = not counts or (len(counts) == len(items) and min(counts) > 0 and max(counts) <= k)
    if rest or not fits or not 0 < k <= min(item.k for item in items):
        _plainly(items, pb.UNDRAFTED_ERROR)
        return
    tokens = list(uniform.tokens)
    counts = counts or [k] * len(items)
    shared = SharedQ(uniform.q, (len(items), k), max(counts)) if uniform.HasField("q") else None
    for row, (item, drafted) in enumerate(zip(items, counts, strict=True)):
        item.tokens, item.q = tokens[row * k : row * k + drafted], partial(shared.of, row) if shared else None


def _take_over(item: Item, drafted: draft_pb2.DraftReplyItem | None) -> None:
    """Copy draft tokens and q from a reply to its item; if the reply is unusable, set the reason in `undrafted`."""
    if drafted is None or drafted.status.code != tensor_pb2.CODE_OK or len(drafted.tokens) > item.k:
        item.undrafted = pb.UNDRAFTED_ERROR
    elif not drafted.tokens:
        item.undrafted = pb.UNDRAFTED_BEHIND
    else:
        item.tokens, item.q = list(drafted.tokens), partial(read_q, drafted.q) if drafted.HasField("q") else None
