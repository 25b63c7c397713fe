"""Who waits, who starts, who is in the next batch. A pure data structure: no I/O, clock, torch or async.

It is the one place where a sequence changes state. The engine tells it what happened and asks what to do next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import ceil

from gateway.sequence import Logprob, Round, Sequence, State
from spire.errors import InvalidRequest, OutOfCapacity

# A sequence lost this often without one new token in between is given up: it may be what kills the verifier.
MAX_FRUITLESS_LIVES = 4


# The sequences of a round, by wire id.
Batch = dict[str, Sequence]


class Scheduler:
    """Up to `lanes` rounds may be under way at once, each of at least `least_lane` sequences."""

    def __init__(self, capacity: int, max_waiting: int, lanes: int = 1, least_lane: int = 4):
        self.capacity = capacity
        self.max_waiting = max_waiting
        self._lanes, self._least_lane = lanes, least_lane
        self.waiting: deque[Sequence] = deque()
        self.starting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self._ended: list[str] = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.starting or self.running)

    @property
    def has_free(self) -> bool:
        """Whether a sequence runs whose next round could begin."""
        return any(not sequence.under_way for sequence in self.running.values())

    @property
    def held(self) -> int:
        """Sequences that hold a place at the verifier."""
        return len(self.starting) + len(self.running)

    @property
    def unstarted(self) -> int:
        """Sequences that wait for a place, or for the first token of a life."""
        return len(self.waiting) + len(self.starting)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the choices of one request, all or none.

        Raises OutOfCapacity when the queue is too full for them, InvalidRequest when they never fit.
        """
        new = list(sequences)
        if len(new) > self.max_waiting:
            raise InvalidRequest(
                f"{len(new)} choices are asked for at once, and the queue has {self.max_waiting} places", "n"
            )
        if len(self.waiting) + len(new) > self.max_waiting:
            raise OutOfCapacity(f"{len(self.waiting)} of {self.max_waiting} queue places are taken: try again later")
        self.waiting.extend(new)

    def admit(self) -> list[Sequence]:
        """The sequences to start now: what fits, in order of arrival."""
        starts = []
        while self.waiting and self.held < self.capacity:
            sequence = self.waiting.popleft()
            sequence.state = State.STARTING
            sequence.life += 1
            sequence.round = sequence.under_way = 0
            sequence.quiet = False
            self.starting[sequence.wire_id] = sequence
            starts.append(sequence)
        return starts

    def batch(self, after: Batch | None = None) -> Batch:
        """A lane's share of what runs, for a round: whoever is in no other, and of the batch that it comes right
        `after`, whose plain round is still under way, whoever that one does not end. Tell `end_round` when it is over.
        """
        lanes = max(1, min(self._lanes, len(self.running) // self._least_lane))
        free = (
            (wire_id, one)
            for wire_id, one in self.running.items()
            if not one.under_way or (after and wire_id in after and one.tokens_left > one.under_way)
        )
        batch = dict(islice(free, ceil(len(self.running) / lanes)))
        for sequence in batch.values():
            sequence.under_way += 1
        return batch

    def still(self, batch: Batch) -> list[Sequence]:
        """Those of a round's batch that go on, in the same life."""
        return [sequence for wire_id, sequence in batch.items() if self.running.get(wire_id) is sequence]

    def end_round(self, batch: Batch) -> None:
        for sequence in self.still(batch):
            sequence.under_way -= 1

    def started(
        self, wire_id: str, token: int, cached_tokens: int = 0, logprobs: Iterable[Logprob] = ()
    ) -> Sequence | None:
        """The first token of a life; None when that life is over. `cached_tokens` were copied, not computed."""
        sequence = self.starting.pop(wire_id, None)
        if sequence is None:
            return None
        sequence.state = State.RUNNING
        self.running[wire_id] = sequence
        if not sequence.output:
            sequence.cached_tokens = cached_tokens
        self._extend(sequence, [token], logprobs)
        return sequence

    def commit(self, sequence: Sequence, tokens: list[int], drafted: int, logprobs: Iterable[Logprob] = ()) -> int:
        """One round's tokens: the accepted ones and one more. Returns how many were kept."""
        accepted = len(tokens) - 1
        sequence.round += 1
        sequence.drafted += drafted
        _count(sequence.accepted_histogram, accepted)
        if sequence.depth == sequence.k:
            _count(sequence.full_depth_histogram, accepted)
        begin = len(sequence.output)
        kept = self._extend(sequence, tokens, logprobs)
        sequence.rounds.append(Round(begin, kept, drafted, accepted))
        sequence.accepted += min(accepted, kept)
        return kept

    def lose(self, sequence: Sequence) -> bool:
        """The verifier no longer holds it: back to the front of the queue. False when it is given up instead."""
        sequence.fruitless_lives += 1
        if sequence.fruitless_lives >= MAX_FRUITLESS_LIVES:
            return False
        self.put_back(sequence)
        return True

    def lose_all(self) -> list[Sequence]:
        """The stream to the verifier is gone. Keeps the order of admission; returns what is given up."""
        held = [*self.running.values(), *self.starting.values()]
        return [sequence for sequence in reversed(held) if not self.lose(sequence)]

    def put_back(self, sequence: Sequence) -> None:
        """To the front of the queue without blame: there was no place for it."""
        self._leave(sequence)
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        """End it, from whatever state. Ending twice changes nothing."""
        if sequence.finished:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self._leave(sequence)
        sequence.state = State.FINISHED
        sequence.finish_reason = reason
        sequence.error = error

    def take_ended(self) -> list[str]:
        """Wire ids whose place at the verifier can be released, each told once."""
        ended, self._ended = self._ended, []
        return ended

    def _leave(self, sequence: Sequence) -> None:
        holder = {State.STARTING: self.starting, State.RUNNING: self.running}.get(sequence.state)
        if holder is not None:
            del holder[sequence.wire_id]
            self._ended.append(sequence.wire_id)

    def _extend(self, sequence: Sequence, tokens: list[int], logprobs: Iterable[Logprob]) -> int:
        """Keep tokens up to the end of the text. All but the last one were guessed by the draft."""
        sequence.fruitless_lives = 0
        room = tokens[: sequence.tokens_left]
        end = next((at for at, token in enumerate(room) if token in sequence.end_tokens), None)
        kept = room if end is None else room[: end + 1]
        sequence.output += kept
        sequence.from_draft += [at < len(tokens) - 1 for at in range(len(kept))]
        sequence.logprobs += islice(logprobs, len(kept))
        if end is not None:
            self.finish(sequence, "stop")
        elif sequence.tokens_left == 0:
            self.finish(sequence, "length")
        return len(kept)


def _count(histogram: list[int], value: int) -> None:
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1
