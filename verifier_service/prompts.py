"""Prompts that wait for prefill: whose positions come next, and how many of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from spire.model.cache import TargetCache
from verifier_service.sequence import Sequence
from verifier_service.step import PromptChunk
from verifier_service.token_budget import TokenBudget

# Positions that are rather padded than computed apart: what a part costs to begin.
_PADDING = 32


@dataclass
class _Part:
    """Prompts whose next `shortest` to `length` tokens are computed together, padded to the longest."""

    chosen: list[Sequence]
    length: int
    shortest: int

    def fits(self, length: int) -> bool:
        """Whether nobody is padded by much with one of this length beside them."""
        return max(self.length, length) - min(self.shortest, length) <= _PADDING

    def grown(self, length: int) -> int:
        """Positions, padding counted, by which such a one makes it larger."""
        return max(self.length, length) * (len(self.chosen) + 1) - self.length * len(self.chosen)

    def add(self, sequence: Sequence, length: int) -> None:
        self.chosen.append(sequence)
        self.length, self.shortest = max(self.length, length), min(self.shortest, length)


class Prompts:
    """Sequences that are not prefilled yet, by age. Gateways take turns, a step takes what `budget` says."""

    def __init__(self, cache: TargetCache, budget: TokenBudget):
        self._cache, self._budget = cache, budget
        self._waiting: list[Sequence] = []
        # Of the gateways with others waiting: when each had its last prompt done.
        self._turns: dict[str, int] = {}
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._turn += 1
        self._turns[sequence.gateway] = self._turn
        self._turns = {waiting.gateway: self._turns.get(waiting.gateway, 0) for waiting in self._waiting}

    def unseen(self, taken: int) -> Iterator[Sequence]:
        """Those of the next chunk that have never been in one, as long as there are any."""
        while new := [sequence for part in self._parts(taken) for sequence in part.chosen if not sequence.compared]:
            yield new[0]

    def next_chunk(self, taken: int) -> tuple[list[Sequence], PromptChunk | None]:
        """As much prompt as fits beside the positions `taken` already."""
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

    def _room(self, taken: int) -> int:
        """A little of the budget always, or prompts would starve beside many blocks."""
        return max(self._budget.positions - taken, -(-self._budget.positions // 4))

    def _parts(self, taken: int) -> list[_Part]:
        """Who is in the next chunk. Half of its room is the first's in turn; of the rest each takes what it needs, who
        needs the least first: so a long prompt goes on, and no short one waits for all of it.

        Prompts of about the same length are one part.
        """
        parts: list[_Part] = []
        by_age = self._in_turn(self._waiting)
        if not by_age:
            return parts
        room = self._room(taken)
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

    def _place(self, sequence: Sequence, length: int, parts: list[_Part], room: int) -> int:
        """Put it into the part of those that are about as long, or one of its own. Returns the room that it takes."""
        for part in parts:
            # Padding may need memory that nobody promised.
            if part.grown(length) <= room and part.fits(length) and self._reserve(part, sequence, length):
                taken = part.grown(length)
                part.add(sequence, length)
                return taken
        parts.append(_Part([sequence], length, length))
        return length

    def _reserve(self, part: _Part, sequence: Sequence, length: int) -> bool:
        slots = [one.slot for one in [*part.chosen, sequence]]
        return self._cache.reserve(slots, max(part.length, length))

    def _in_turn(self, sequences: Rows[Sequence]) -> list[Sequence]:
        """The first of each gateway, in the order of their turns, then the second of each, and so on."""
        before = Counter[str]()
        keys = []
        for sequence in sequences:
            keys.append((before[sequence.gateway], self._turns.get(sequence.gateway, 0)))
            before[sequence.gateway] += 1
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return [sequences[index] for index in order]

    def _remaining(self, sequence: Sequence) -> int:
        return len(sequence.prompt_L) - self._cache.lengths[sequence.slot]
