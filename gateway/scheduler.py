"""Who waits, who starts, who is in the next batch. A pure data structure: no I/O, clock, torch or async.

It is the one place where a sequence changes state. The engine tells it what happened and asks what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice
from math import ceil

from gateway.queue import Held, Queue
from gateway.sequence import Logprob, Round, Sequence, Stage, State
from spire.errors import InvalidRequest, OutOfCapacity

# A sequence lost this often, each time while it was computed and without one new token in between, is given up: it may
# be what kills the verifier.
MAX_FRUITLESS_LIVES = 4
# While the verifier has no room, so many Starts wait there and not here: whatever becomes free is used at once.
MOST_STALLED = 4


# The sequences of a round, by wire id.
Batch = dict[str, Sequence]


class Scheduler:
    """Up to `lanes` rounds may be under way at once, each of at least `least_lane` sequences."""

    def __init__(self, capacity: int, max_waiting: int, lanes: int = 1, least_lane: int = 4):
        self.capacity = capacity
        self.max_waiting = max_waiting
        self._lanes, self._least_lane = lanes, least_lane
        self.waiting = Queue()
        self.starting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self._ended: list[str] = []
        self._arrivals = count(1)
        # How many went back to the queue because others had more right to their place.
        self.gave_way = 0
        # Whether the verifier had no room for the last Start that it told of.
        self._full = False

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
    def has_ended(self) -> bool:
        """Whether there are places to be released."""
        return bool(self._ended)

    @property
    def unstarted(self) -> int:
        """Sequences that wait for a place, or for the first token of a life."""
        return len(self.waiting) + len(self.starting)

    @property
    def reading(self) -> bool:
        """Whether any sequence has room at the verifier and waits for its prompt to be read."""
        return any(not sequence.stalled for sequence in self.starting.values())

    def add(self, sequences: Iterable[Sequence], key: str = "") -> None:
        """Queue the choices of one request of this key, all or none.

        Raises OutOfCapacity when the queue is too full for them, InvalidRequest when they never fit.
        """
        new = list(sequences)
        if len(new) > self.max_waiting:
            raise InvalidRequest(
                f"{len(new)} choices are asked for at once, and the queue has {self.max_waiting} places", "n"
            )
        if len(self.waiting) + len(new) > self.max_waiting:
            raise OutOfCapacity(f"{len(self.waiting)} of {self.max_waiting} queue places are taken: try again later")
        arrivals = [next(self._arrivals) for _ in new]
        for sequence, arrival in zip(new, arrivals, strict=True):
            sequence.key, sequence.request, sequence.arrival = key, arrivals[0], arrival
            self.waiting.add(sequence)

    def admit(self, make_room: bool = False) -> list[Sequence]:
        """The sequences to start now: what fits, by shares and arrival. To `make_room`, where there is none, one that
        is beyond its share goes back to the queue."""
        starts: list[Sequence] = []
        if not self.waiting and not self.stalled:
            return starts
        held = Held(one for one in [*self.running.values(), *self.starting.values()] if not one.stalled)
        while sequence := self.waiting.next(held):
            self._recall([one for one in self.stalled if held.before(sequence, one)])
            if make_room and self.held >= self.capacity and not self.stalled:
                make_room = not self._gives_way(held, sequence)
            if not self._has_room:
                break
            self._start(sequence)
            held.add(sequence)
            starts.append(sequence)
        if make_room and (stalled := self.stalled):
            self._gives_way(held, stalled[0])
        return starts

    def _gives_way(self, held: Held, waiting: Sequence) -> bool:
        """Whether one that is beyond its share has gone back to the queue for this one."""
        if victim := held.beyond_share(waiting):
            held.remove(victim)
            self.put_back(victim)
            self.gave_way += 1
        return victim is not None

    @property
    def stalled(self) -> list[Sequence]:
        """Those that wait for room at the verifier, in the order in which they get it."""
        return [sequence for sequence in self.starting.values() if sequence.stalled]

    @property
    def _has_room(self) -> bool:
        if self.held >= self.capacity:
            return False
        unread = sum(sequence.stage is not Stage.COMPUTED for sequence in self.starting.values())
        return not self._full or unread < MOST_STALLED

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.state, sequence.stage = State.STARTING, Stage.SENT
        sequence.life += 1
        sequence.life_began = len(sequence.output)
        sequence.round = sequence.under_way = 0
        sequence.quiet = False
        self.starting[sequence.wire_id] = sequence

    def stands(self, wire_id: str, stage: Stage) -> None:
        """The verifier tells how far a Start has come."""
        sequence = self.starting.get(wire_id)
        if sequence is None:
            return
        if stage is Stage.STALLED:
            self._full = True
        elif sequence.stage is Stage.SENT:
            self._full = False
        sequence.stage = stage

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
        """The verifier no longer holds it: back to its place in the queue. False when it is given up instead."""
        sequence.fruitless_lives += 1
        if sequence.fruitless_lives >= MAX_FRUITLESS_LIVES:
            return False
        self._recall([sequence])
        return True

    def lose_all(self) -> list[Sequence]:
        """The stream to the verifier is gone. Returns what is given up: of those that were not being computed none is
        to blame."""
        held = [*self.running.values(), *self.starting.values()]
        self._recall(sequence for sequence in held if not sequence.computed)
        self._full = False
        return [sequence for sequence in held if sequence.computed and not self.lose(sequence)]

    def put_back(self, sequence: Sequence) -> None:
        """Back to its place in the queue without blame: it gives way to others, or there was no room for it."""
        sequence.came_back = True
        self._recall([sequence])

    def _recall(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._leave(sequence)
            sequence.state = State.WAITING
            self.waiting.add(sequence)

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
