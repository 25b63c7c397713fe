"""Prompts that wait for prefill: whose positions come next, and how many of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from spire.model.cache import TargetCache
from verifier_service.sequence import Sequence
from verifier_service.step import PromptChunk
from verifier_service.token_budget import TokenBudget

# Positions that are rather padded than computed apart: what a part costs to begin.
_PADDING = 32


@dataclass(frozen=True)
class _Part:
    """Prompts whose next `length` tokens, or a few less, are computed together."""

    chosen: list[Sequence]
    length: int


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
        """Who is in the next chunk: each takes what it needs of the room that is left, the first in turn first.

        Prompts of about the same length are one part.
        """
        room, parts = self._room(taken), list[_Part]()
        for sequence in self._in_turn():
            length = min(self._remaining(sequence), room)
            if length <= 0:
                break
            part = next((part for part in parts if 0 <= part.length - length <= min(_PADDING, room - length)), None)
            # Padding may need memory that nobody promised.
            if part and self._cache.reserve([sequence.slot], part.length):
                part.chosen.append(sequence)
                room -= part.length
            else:
                parts.append(_Part([sequence], length))
                room -= length
        for part in parts:
            part.chosen.sort(key=lambda sequence: sequence.slot)
        return parts

    def _in_turn(self) -> list[Sequence]:
        """The oldest of each gateway, in the order of their turns, then the second of each, and so on."""
        before = Counter[str]()
        keys = []
        for sequence in self._waiting:
            keys.append((before[sequence.gateway], self._turns.get(sequence.gateway, 0)))
            before[sequence.gateway] += 1
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return [self._waiting[index] for index in order]

    def _remaining(self, sequence: Sequence) -> int:
        return len(sequence.prompt_L) - self._cache.lengths[sequence.slot]
