"""The scheduler decides which sequences wait, start and run. A pure data structure: no I/O, clock, torch or async.

Only the scheduler changes the state of a sequence. The engine reports events to the scheduler and asks what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice

from gateway.rounds.queue import Held, Queue
from gateway.sequence import Logprob, RoundResult, Sequence, Stage, State
from spire.errors import InvalidRequest, OutOfCapacity

# A sequence lost this often, each time while it was computed and without a new token in between, is given up: it may be
# the cause of the verifier's failures.
MAX_FRUITLESS_LIVES = 4
# Most Starts that wait at the verifier while it has no room, so that freed room is used at once.
MOST_STALLED = 4

# The sequences of a round, by wire id.
Batch = dict[str, Sequence]


class Scheduler:
    def __init__(self, capacity: int, max_waiting: int):
        self.capacity, self.max_waiting = capacity, max_waiting
        self.waiting = Queue()
        self.starting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self._ended: list[str] = []
        self._arrivals = count(1)
        # Number of preempted sequences: put back in the queue because another was more entitled to the place.
        self.gave_way = 0
        # Whether the verifier had no room for the last Start whose stage it reported.
        self._full = False
        # Sequences that were being computed when the verifier was lost, until it is known whether it died.
        self.suspects: list[Sequence] = []
        # Wire ids of preempted sequences whose places are not free at the verifier yet.
        self._victims: set[str] = set()

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.starting or self.running)

    @property
    def has_free(self) -> bool:
        """True if at least one running sequence has no round under way."""
        return any(not sequence.under_way for sequence in self.running.values())

    @property
    def held(self) -> int:
        """The number of sequences that hold a place at the verifier."""
        return len(self.starting) + len(self.running)

    @property
    def has_ended(self) -> bool:
        """True if ended sequences are to be released at the verifier."""
        return bool(self._ended)

    @property
    def unstarted(self) -> int:
        """The number of sequences that wait for a place, or for the first token after their last Start."""
        return len(self.waiting) + len(self.starting)

    @property
    def reading(self) -> bool:
        """True if a starting sequence waits for its prefill rather than for room at the verifier."""
        return any(not sequence.stalled for sequence in self.starting.values())

    def add(self, sequences: Iterable[Sequence], key: str = "") -> None:
        """Queue all sequences of one request, or none. `key`: the name of the client's API key.

        API keys with queued sequences share the queue evenly. Raises OutOfCapacity if the key's share has too little
        room now, InvalidRequest if the sequences can never fit.
        """
        new = list(sequences)
        if len(new) > self.max_waiting:
            message = f"{len(new)} choices are asked for at once, and the queue has {self.max_waiting} places"
            raise InvalidRequest(message, "n")
        taken, share = self.waiting.of_key(key), max(1, self.max_waiting // len(self.waiting.keys | {key}))
        if taken + len(new) > share:
            raise OutOfCapacity(f"{taken} of {share} queue places are taken: try again later")
        for sequence in new:
            sequence.arrival = next(self._arrivals)
            sequence.key, sequence.request = key, new[0].arrival
            self.waiting.add(sequence)

    def admit(self) -> list[Sequence]:
        """Return the sequences to start, by shares and arrival. If full, preempt one over its share, one at a time."""
        starts, make_room = list[Sequence](), not self._victims
        if not self.waiting and not self.stalled:
            return starts
        held = self._holders
        stalled = Queue(self.stalled)
        while sequence := self.waiting.next(held):
            if (ahead := stalled.next(held)) and held.before(ahead, sequence):
                stalled.remove(ahead)
                held.add(ahead)
                continue
            self._recall(stalled)
            stalled = Queue()
            if make_room and self.held >= self.capacity and not self.stalled:
                make_room = not self._gives_way(held, sequence)
            if not self._has_room or (_on_trial(sequence) and any(map(_on_trial, self.starting.values()))):
                break
            self._start(sequence)
            held.add(sequence)
            starts.append(sequence)
        if make_room and self.stalled:
            self._gives_way(self._holders, self.stalled[0])
        return starts

    @property
    def _holders(self) -> Held:
        """Number of places per API key and per request, not counting sequences that wait for room at the verifier."""
        return Held(one for one in [*self.running.values(), *self.starting.values()] if not one.stalled)

    def _gives_way(self, held: Held, waiting: Sequence) -> bool:
        """Preempt a sequence beyond its share in favour of `waiting`. Return False if there is no such sequence."""
        if victim := held.beyond_share(waiting):
            self._victims.add(victim.wire_id)
            held.remove(victim)
            self.put_back(victim)
            self.gave_way += 1
        return victim is not None

    @property
    def stalled(self) -> list[Sequence]:
        """The sequences that wait for room at the verifier, in the order in which they get it."""
        return [sequence for sequence in self.starting.values() if sequence.stalled]

    @property
    def _has_room(self) -> bool:
        if self.held >= self.capacity:
            return False
        without_room = sum(sequence.stage in (Stage.SENT, Stage.STALLED) for sequence in self.starting.values())
        return not self._full or without_room < MOST_STALLED

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.state, sequence.stage = State.STARTING, Stage.SENT
        sequence.life += 1
        sequence.life_began = len(sequence.output)
        sequence.round = sequence.under_way = 0
        sequence.paused = False
        self.starting[sequence.wire_id] = sequence

    def stands(self, wire_id: str, stage: Stage) -> None:
        """Record the stage that the verifier reports for a starting sequence."""
        sequence = self.starting.get(wire_id)
        if sequence is None:
            return
        if stage is Stage.STALLED:
            self._full = True
        elif sequence.stage is Stage.SENT:
            self._full = False
        sequence.stage = stage

    def batch(self, after: Batch | None = None) -> Batch:
        """Return the next round's sequences: running ones without a round under way. Call `end_round` after the round.

        `after`: the batch under way, whose sequences join if max_tokens leaves them more tokens than pending rounds.
        """
        batch = {
            wire_id: one
            for wire_id, one in self.running.items()
            if not one.under_way or (after and wire_id in after and one.tokens_left > one.under_way)
        }
        for sequence in batch.values():
            sequence.under_way += 1
        return batch

    def still(self, batch: Batch) -> list[Sequence]:
        """Return the sequences of a batch that still run and have not been restarted since."""
        return [sequence for wire_id, sequence in batch.items() if self.running.get(wire_id) is sequence]

    def end_round(self, batch: Batch) -> None:
        for sequence in self.still(batch):
            sequence.under_way -= 1

    def started(self, sequence: Sequence, token: int, cached_tokens: int = 0, logprobs: Iterable[Logprob] = ()) -> int:
        """Commit a Start's first token. Return 1 if kept, else 0. `cached_tokens`: prompt tokens copied from cache."""
        del self.starting[sequence.wire_id]
        sequence.state = State.RUNNING
        self.running[sequence.wire_id] = sequence
        if not sequence.output:
            sequence.cached_tokens = cached_tokens
        return self._extend(sequence, [token], logprobs)

    def commit(self, sequence: Sequence, tokens: list[int], drafted: int, logprobs: Iterable[Logprob] = ()) -> int:
        """Commit a round's tokens: accepted draft tokens and one of the target. Return the number kept as output."""
        accepted = len(tokens) - 1
        sequence.round += 1
        sequence.drafted += drafted
        _count(sequence.drafted_histogram, drafted)
        _count(sequence.accepted_histogram, accepted)
        if sequence.depth == sequence.k:
            _count(sequence.full_depth_histogram, accepted)
        begin = len(sequence.output)
        kept = self._extend(sequence, tokens, logprobs)
        sequence.rounds.append(RoundResult(begin, kept, drafted, accepted))
        sequence.accepted += min(accepted, kept)
        return kept

    def lose(self, sequence: Sequence) -> bool:
        """Queue again a sequence that the verifier lost. If it was lost too often, only return False: it must fail."""
        if _lost_too_often(sequence):
            return False
        self._recall([sequence])
        return True

    def lose_all(self) -> None:
        """Queue all started sequences again, because the verifier was lost. Those being computed become suspects."""
        held = [*self.running.values(), *self.starting.values()]
        self.suspects += [sequence for sequence in held if sequence.computed]
        self._recall(held)
        self._full = False
        self._victims.clear()

    def settle(self, died: bool) -> list[Sequence]:
        """Clear the suspects. If the verifier `died`, count a loss for each; return those that must fail for that."""
        suspects, self.suspects = self.suspects, []
        return [one for one in suspects if died and not one.finished and _lost_too_often(one)]

    def put_back(self, sequence: Sequence) -> None:
        """Queue again a sequence that was preempted, or refused for lack of room, without counting a loss."""
        sequence.came_back = True
        self._recall([sequence])

    def _recall(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._leave(sequence)
            sequence.state = State.WAITING
            self.waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: str, error: Exception | None = None) -> None:
        """End a sequence in any state, with a finish reason and possibly an error. No effect on an ended sequence."""
        if sequence.finished:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self._leave(sequence)
        sequence.state = State.FINISHED
        sequence.finish_reason = reason
        sequence.error = error

    def take_ended(self) -> list[str]:
        """Return the wire ids of sequences to release at the verifier. Each id is returned only once."""
        ended, self._ended = self._ended, []
        return ended

    def released(self, wire_ids: Iterable[str]) -> None:
        """Record that these sequences have been released at the verifier."""
        self._victims.difference_update(wire_ids)

    def _leave(self, sequence: Sequence) -> None:
        if self.starting.pop(sequence.wire_id, None) or self.running.pop(sequence.wire_id, None):
            self._ended.append(sequence.wire_id)

    def _extend(self, sequence: Sequence, tokens: list[int], logprobs: Iterable[Logprob]) -> int:
        """Append tokens (draft tokens but for the last) to the output up to its end. Return the number appended."""
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


def _on_trial(sequence: Sequence) -> bool:
    """True for a sequence that may be the cause of deaths. Only one starts at a time, so that it dies alone."""
    return sequence.fruitless_lives > 1


def _lost_too_often(sequence: Sequence) -> bool:
    sequence.fruitless_lives += 1
    return sequence.fruitless_lives >= MAX_FRUITLESS_LIVES


def _count(histogram: list[int], value: int) -> None:
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1
