"""Prompts that wait for prefill: whose positions come next, and how many of them at once."""

from __future__ import annotations

from collections.abc import Iterator

from spire.model.cache import TargetCache
from verifier_service.sequence import Sequence
from verifier_service.step import PromptChunk


class Prompts:
    """Sequences that are not prefilled yet, by age. Gateways take turns, a step takes `token_budget` positions."""

    def __init__(self, cache: TargetCache, token_budget: int):
        self._cache, self._token_budget = cache, token_budget
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
        while new := [sequence for sequence in self._share(self._room(taken))[0] if not sequence.compared]:
            yield new[0]

    def next_chunk(self, taken: int) -> tuple[list[Sequence], PromptChunk | None]:
        """As much prompt as fits beside the positions `taken` already."""
        chosen, length = self._share(self._room(taken))
        if not chosen:
            return [], None
        starts = [self._cache.lengths[sequence.slot] for sequence in chosen]
        tokens = [s.prompt_L[at : at + length] for s, at in zip(chosen, starts, strict=True)]
        last = [len(s.prompt_L) == at + len(c) for s, at, c in zip(chosen, starts, tokens, strict=True)]
        following = [
            list(s.start.tokens[at + 1 : at + 1 + len(c)]) if s.start.prompt_logprobs else []
            for s, at, c in zip(chosen, starts, tokens, strict=True)
        ]
        return chosen, PromptChunk([sequence.slot for sequence in chosen], tokens, last, following)

    def _room(self, taken: int) -> int:
        """A little of the budget always, or prompts would starve beside many blocks."""
        return max(self._token_budget - taken, -(-self._token_budget // 4))

    def _share(self, room: int) -> tuple[list[Sequence], int]:
        """By slot, the prompts of the next chunk and its length.

        The oldest of the gateway whose turn it is takes what it needs of the room; others of about that length share
        the chunk.
        """
        if not self._waiting:
            return [], 0
        oldest = min(self._waiting, key=lambda sequence: self._turns.get(sequence.gateway, 0))
        others = [sequence for sequence in self._waiting if sequence is not oldest]
        length = min(self._remaining(oldest), room)
        alike = [sequence for sequence in others if self._remaining(sequence) <= 2 * length]
        chosen = sorted([oldest, *alike][: max(1, room // length)], key=lambda sequence: sequence.slot)
        # Padding may need memory that nobody promised.
        return (chosen if self._cache.reserve([s.slot for s in chosen], length) else [oldest]), length

    def _remaining(self, sequence: Sequence) -> int:
        return len(sequence.prompt_L) - self._cache.lengths[sequence.slot]
