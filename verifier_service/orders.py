"""Orders: what the verifier asks of drafts for blocks that wait, and what they guess. All on the engine's thread.

A gateway says how deep, the verifier knows behind which token: so a draft is asked the moment that token is committed,
and its guesses come straight to where they are verified. What does not come in time, or at all, is decoded plainly.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from spire.pace import Pace
from spire.v1 import draft_pb2, tensor_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.batch import Item, Limits, SharedQ
from verifier_service.sequence import Sequence
from verifier_service.tasks import VerifyTask

# What a gateway may ask a draft to take at most.
_MOST_PATIENCE = 60.0

# Has taken what it needs of the message when it returns: the next order may be the same one, with other numbers.
Send = Callable[[draft_pb2.ProposeBatch], None]


@dataclass(frozen=True)
class Order:
    """A draft's part of a batch: the items it guesses for, and until when."""

    draft_id: str
    task: VerifyTask
    items: list[Item]
    at: float
    deadline: float


class Orders:
    """By id, those under way."""

    def __init__(self, sequences: Mapping[str, Sequence], limits: Limits, pace: Pace):
        self._sequences, self._limits, self._pace = sequences, limits, pace
        self._drafts: dict[str, Send] = {}
        # By draft id, the last order and for whom it was: as a rule the next one is for the same sequences.
        self._last: dict[str, tuple[list[Sequence], draft_pb2.ProposeBatch]] = {}
        self._under_way: dict[int, Order] = {}
        # By draft id, the order that it was too late for last: until it answers that, nobody waits for it again.
        self._owed: dict[str, int] = {}
        self._ids = count(1)

    def connect(self, draft_id: str, send: Send) -> None:
        """Ask this draft there from now on. What it was asked before is lost."""
        self._lose(draft_id)
        self._drafts[draft_id] = send

    def disconnect(self, draft_id: str, send: Send) -> None:
        if self._drafts.get(draft_id) == send:
            del self._drafts[draft_id]
            self._last.pop(draft_id, None)
            self._lose(draft_id)

    def place(self, task: VerifyTask) -> None:
        """Ask for what a batch's items want. Its sequences' last blocks have been concluded."""
        by_draft: defaultdict[str, list[tuple[Item, Sequence]]] = defaultdict(list)
        for item in task.items:
            sequence = self._sequences.get(item.sequence_id) if item.k and not item.tokens else None
            if not sequence or sequence.gateway != task.gateway:
                continue
            if sequence.started and item.round == sequence.round + 1:
                by_draft[sequence.draft_id].append((item, sequence))
        for draft_id, asked in by_draft.items():
            items = [item for item, _ in asked]
            send = self._drafts.get(draft_id)
            if send is None:
                _plainly(task, items, pb.UNDRAFTED_LOST)
            elif draft_id in self._owed:
                _plainly(task, items, pb.UNDRAFTED_OWING)
            else:
                send(self._order(draft_id, task, items, [sequence for _, sequence in asked]))

    def _order(
        self, draft_id: str, task: VerifyTask, items: list[Item], sequences: list[Sequence]
    ) -> draft_pb2.ProposeBatch:
        now, order_id = time.perf_counter(), next(self._ids)
        patience = min(max(0.0, task.batch.patience_seconds), _MOST_PATIENCE)  # 0 also where it is no number
        self._under_way[order_id] = Order(draft_id, task, items, now, now + patience)
        task.orders += 1
        batch = self._message(draft_id, sequences)
        batch.batch_id, batch.step_seconds = order_id, self._pace.step_seconds
        for item, sequence, asked in zip(items, sequences, batch.items, strict=True):
            base = len(sequence.tokens) - 1
            asked.base, asked.newest_token = base, sequence.newest
            asked.k = max(0, min(item.k, self._limits.max_depth, self._limits.max_context - base - 1))
        return batch

    def _message(self, draft_id: str, sequences: list[Sequence]) -> draft_pb2.ProposeBatch:
        """An order for these, but for what differs from round to round."""
        known, batch = self._last.get(draft_id, ([], draft_pb2.ProposeBatch()))
        if len(known) != len(sequences) or not all(map(operator.is_, known, sequences)):
            batch = draft_pb2.ProposeBatch(items=[_asked(sequence) for sequence in sequences])
            self._last[draft_id] = sequences, batch
        return batch

    def take(self, draft_id: str, result: draft_pb2.ProposeBatchResult, received: float) -> None:
        """What a draft guessed, and when it came. What was given up meanwhile is nothing to anybody."""
        if self._owed.get(draft_id) == result.batch_id:
            del self._owed[draft_id]
        order = self._under_way.get(result.batch_id)
        if order is None or order.draft_id != draft_id:
            return
        del self._under_way[result.batch_id]
        task = order.task
        if result.HasField("guesses"):
            _take_all_over(order, result.guesses)
        else:
            proposals = {proposal.sequence_id: proposal for proposal in result.proposals}
            for item in order.items:
                if why := _taken_over(item, proposals.get(item.sequence_id)):
                    task.undrafted[item.sequence_id] = why
        task.orders -= 1
        task.drafting_seconds = max(task.drafting_seconds, received - order.at)
        if result.timings.forward_seconds >= task.drafting.forward_seconds:
            task.drafting.CopyFrom(result.timings)

    def give_up_late(self) -> None:
        """Do without those whose time is over."""
        now = time.perf_counter()
        for order_id in [i for i, order in self._under_way.items() if order.deadline <= now]:
            self._owed[self._under_way[order_id].draft_id] = order_id
            self._give_up(order_id, pb.UNDRAFTED_LATE)

    @property
    def patience(self) -> float | None:
        """Seconds until the next is given up; None when there is none."""
        deadlines = [order.deadline for order in self._under_way.values()]
        return max(0.0, min(deadlines) - time.perf_counter()) if deadlines else None

    def _lose(self, draft_id: str) -> None:
        self._owed.pop(draft_id, None)
        for order_id in [i for i, order in self._under_way.items() if order.draft_id == draft_id]:
            self._give_up(order_id, pb.UNDRAFTED_LOST)

    def _give_up(self, order_id: int, why: pb.Undrafted) -> None:
        order = self._under_way.pop(order_id)
        order.task.orders -= 1
        order.task.drafting_seconds = max(order.task.drafting_seconds, time.perf_counter() - order.at)
        _plainly(order.task, order.items, why)


def _asked(sequence: Sequence) -> draft_pb2.ProposeItem:
    return draft_pb2.ProposeItem(sequence_id=sequence.id, sampling=sequence.start.sampling)


def _plainly(task: VerifyTask, items: list[Item], why: pb.Undrafted) -> None:
    for item in items:
        task.undrafted[item.sequence_id] = why


def _take_all_over(order: Order, guesses: draft_pb2.Guesses) -> None:
    """Make what was guessed for all items at once their blocks."""
    k, rest = divmod(len(guesses.tokens), len(order.items))
    if rest or not 0 < k <= min(item.k for item in order.items):
        _plainly(order.task, order.items, pb.UNDRAFTED_ERROR)
        return
    tokens = list(guesses.tokens)
    shared = SharedQ(guesses.q, len(order.items), k) if guesses.HasField("q") else None
    for row, item in enumerate(order.items):
        item.tokens, item.q = tokens[row * k : row * k + k], (shared, row) if shared else None


def _taken_over(item: Item, proposal: draft_pb2.Proposal | None) -> pb.Undrafted | None:
    """Make a proposal the item's block; returns why it cannot be."""
    if proposal is None or proposal.status.code != tensor_pb2.CODE_OK or len(proposal.tokens) > item.k:
        return pb.UNDRAFTED_ERROR
    if not proposal.tokens:
        return pb.UNDRAFTED_BEHIND
    item.tokens, item.q = list(proposal.tokens), proposal.q if proposal.HasField("q") else None
    return None
