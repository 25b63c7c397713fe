"""Prompts that wait for prefill: the choice of the next chunk, and the number of its positions (`TokenBudget`)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence as Rows
from dataclasses import dataclass
from itertools import count
from statistics import median

from spire.model.cache.target_cache import TargetCache
from verifier_service.engine.sequence import HeldSequence
from verifier_service.engine.step import PromptChunk

# The most padding of a row, in positions: computing so much padding costs less than a separate part.
_PADDING = 32
# Seconds that a step with prompts should take, or twice a step without prompts if that is longer: the sequences that
# are decoded in the same step wait for it.
_GOAL_SECONDS = 0.5
# A step with fewer than _FEWEST positions takes nearly as long as one with _FEWEST, above all on a busy machine.
_FEWEST, _MOST = 64, 512
_REMEMBERED = 8


class TokenBudget:
    """The number of `positions` for a step: `given`, or if 0, as many as a step computes in about half a second.

    The number is derived from median times of the last steps, so that one slow step on a busy machine changes little.
    """

    def __init__(self, given: int):
        self._given = given
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._plain: deque[float] = deque([0.0], maxlen=_REMEMBERED)
        self.positions = given or _FEWEST

    def observe_plain(self, seconds: float) -> None:
        """Record the duration of a step without prompts."""
        self._plain.append(seconds)

    def observe(self, positions: int, seconds: float) -> None:
        """Record the size and duration of a step with prompts, and adapt `positions`."""
        if not self._given:
            self._sizes.append(positions)
            self._seconds.append(seconds)
            # Measurements predict nothing beyond the present size or twice the largest one measured.
            trusted = max(self.positions, 2 * max(self._sizes))
            plain = median(self._plain)
            for_prompts, goal = median(self._seconds) - plain, max(_GOAL_SECONDS, 2 * plain) - plain
            fitting = int(min(_MOST, median(self._sizes) * goal / for_prompts)) if for_prompts > 0 else _MOST
            self.positions = max(_FEWEST, min(fitting, trusted))


@dataclass
class _Part:
    """Prompts whose next chunks, of `shortest` to `length` tokens, are computed together, padded to `length`."""

    chosen: list[HeldSequence]
    length: int
    shortest: int

    def fits(self, length: int) -> bool:
        """True if a chunk of this length can be added without more than _PADDING positions of padding in any row."""
        return max(self.length, length) - min(self.shortest, length) <= _PADDING

    def grown(self, length: int) -> int:
        """Return the number of positions, padding included, that a chunk of this length would add."""
        return max(self.length, length) * (len(self.chosen) + 1) - self.length * len(self.chosen)

    def add(self, sequence: HeldSequence, length: int) -> None:
        self.chosen.append(sequence)
        self.length, self.shortest = max(self.length, length), min(self.shortest, length)


class Prompts:
    """The sequences to prefill, oldest first. Gateways take turns; `budget` limits the chunk of each step."""

    def __init__(self, cache: TargetCache, budget: TokenBudget):
        self._cache, self._budget = cache, budget
        self._waiting: list[HeldSequence] = []
        # gateway -> the turn in which its last prompt was removed; only for gateways with waiting prompts.
        self._turns: dict[str, int] = {}
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, sequence: HeldSequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: HeldSequence) -> None:
        self._waiting.remove(sequence)
        self._turn += 1
        self._turns[sequence.gateway] = self._turn
        self._turns = {waiting.gateway: self._turns.get(waiting.gateway, 0) for waiting in self._waiting}

    def unseen(self, taken: int) -> Iterator[HeldSequence]:
        """Yield each sequence of the next chunk for which the caller has not yet searched for a prefix to copy."""
        while new := [one for part in self._parts(taken) for one in part.chosen if self._may_copy(one)]:
            yield new[0]

    def _may_copy(self, sequence: HeldSequence) -> bool:
        return not sequence.compared and self._cache.lengths[sequence.slot] >= sequence.before_copy

    def next_chunk(self, taken: int) -> tuple[list[HeldSequence], PromptChunk | None]:
        """Return the next chunk's sequences, and the chunk: prompts that fit beside `taken` positions to verify."""
        parts = self._parts(taken)
        if not parts:
            return [], None
        chosen = [sequence for part in parts for sequence in part.chosen]
        starts = [self._cache.lengths[sequence.slot] for sequence in chosen]
        lengths = [part.length for part in parts for _ in part.chosen]
        tokens = [s.prompt_L[at : at + length] for s, at, length in zip(chosen, starts, lengths, strict=True)]
        last = [len(s.prompt_L) == at + len(c) for s, at, c in zip(chosen, starts, tokens, strict=True)]
        following = [
            list(s.start.tokens[at + 1 : at + 1 + len(c)]) if s.start.prompt_logprobs else []
            for s, at, c in zip(chosen, starts, tokens, strict=True)
        ]
        slots, rows = [sequence.slot for sequence in chosen], [len(part.chosen) for part in parts]
        return chosen, PromptChunk(slots, tokens, last, following, rows)

    def _parts(self, taken: int) -> list[_Part]:
        """Choose the prompts of the next chunk, and group prompts of similar length into parts.

        Up to half of the positions are reserved for the prompt whose turn it is. The other positions go to the prompts
        with the fewest remaining positions. So a long prompt advances, and short prompts do not wait for all of it.
        """
        parts: list[_Part] = []
        by_age = self._in_turn(self._waiting)
        if not by_age:
            return parts
        # At least a quarter of the budget, or prompts would starve beside many blocks.
        room = max(self._budget.positions - taken, -(-self._budget.positions // 4))
        kept = min(self._remaining(by_age[0]), room // 2)
        room -= kept
        for sequence in self._in_turn(sorted(by_age, key=self._remaining)):
            if sequence is by_age[0]:
                room += kept
            if length := min(self._remaining(sequence), room):
                room -= self._place(sequence, length, parts, room)
        for part in parts:
            part.chosen.sort(key=lambda sequence: sequence.slot)
        return parts

    def _place(self, sequence: HeldSequence, length: int, parts: list[_Part], room: int) -> int:
        """Add the sequence to a part of similar length, or to a new part. Return the number of positions added."""
        for part in parts:
            if (grown := part.grown(length)) > room or not part.fits(length):
                continue
            # Padding may need memory that has not been reserved.
            slots = [one.slot for one in [*part.chosen, sequence]]
            if self._cache.reserve(slots, max(part.length, length)):
                part.add(sequence, length)
                return grown
        parts.append(_Part([sequence], length, length))
        return length

    def _in_turn(self, sequences: Rows[HeldSequence]) -> list[HeldSequence]:
        """Interleave the gateways, in order of their turns: the first sequence of each gateway, then the second, ..."""
        before: defaultdict[str, Iterator[int]] = defaultdict(count)
        return sorted(sequences, key=lambda one: (next(before[one.gateway]), self._turns.get(one.gateway, 0)))

    def _remaining(self, sequence: HeldSequence) -> int:
        """Return the number of positions to compute until the sequence may copy a prefix or its prompt is complete."""
        computed, whole = self._cache.lengths[sequence.slot], len(sequence.prompt_L)
        return (whole if computed >= sequence.before_copy else sequence.before_copy) - computed
