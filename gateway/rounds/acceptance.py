"""Estimates τ(k), the mean tokens that a round at depth k gives a sequence, from the blocks of earlier rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class BlockResult(NamedTuple):
    """A block of a round: the draft tokens that were asked for, those that were drafted, and those accepted."""

    asked: int
    drafted: int
    accepted: int


class Acceptance:
    """Estimates, for each position of a block, the acceptance rate of draft tokens whose predecessors are accepted.

    Under the block rule the rates are the same, in the mean, whatever the depth of the rounds: the chance that a prefix
    is kept does not depend on how much is drafted after it.
    """

    # Blocks to remember, and the fewest rounds: workloads drift, and a large batch has many blocks at once.
    _BLOCKS, _ROUNDS = 500.0, 20.0
    # Prior rate of the first position, and weight of a prior: the prior of a later position is the rate before it.
    _FIRST, _WEIGHT = 0.75, 4.0

    def __init__(self, deepest: int):
        self.tried, self.accepted = [0.0] * deepest, [0.0] * deepest
        # Of blocks by position: how many were asked for a token there, and how many got one before the draft stopped.
        self.asked, self.drafted = [0.0] * deepest, [0.0] * deepest
        self._judged, self._stood = 0.0, 0.0
        self.idle = 0

    @property
    def rate(self) -> float:
        """The share of accepted tokens among those drafted whose predecessors were accepted."""
        return (self._stood + self._WEIGHT * self._FIRST) / (self._judged + self._WEIGHT)

    def mean_drafted(self) -> list[float]:
        """Return how many tokens are drafted, in the mean, for a block that asks for 0, 1, … tokens."""
        shares = zip(self.asked, self.drafted, strict=True)
        return list(accumulate(((drafted + 1) / (asked + 1) for asked, drafted in shares), initial=0.0))

    def observe(self, blocks: Sequence[BlockResult]) -> None:
        """Learn from a round's blocks. A round without blocks counts as idle.

        τ(k) is what asking for k tokens brings: a token that was not drafted because the draft stopped counts there as
        one that is not accepted. `rate` counts only what was drafted.
        """
        if not blocks:
            self.idle += 1
            return
        keep = (1 - min(1 / self._ROUNDS, len(blocks) / self._BLOCKS)) ** (1 + min(self.idle, self._ROUNDS))
        self.idle = 0
        self.tried = [count * keep for count in self.tried]
        self.accepted = [count * keep for count in self.accepted]
        self.asked = [count * keep for count in self.asked]
        self.drafted = [count * keep for count in self.drafted]
        self._judged, self._stood = self._judged * keep, self._stood * keep
        for asked, drafted, accepted in blocks:
            for position in range(min(asked, accepted + 1, len(self.tried))):
                self.tried[position] += 1
                self.accepted[position] += position < accepted
            for position in range(min(asked, len(self.asked))):
                self.asked[position] += 1
                self.drafted[position] += position < drafted
            self._judged += min(drafted, accepted + 1)
            self._stood += accepted

    def taus(self) -> list[float]:
        """Return τ, the estimated tokens per sequence and round, at depths 0, 1, …"""
        rate, prefix, taus = self._FIRST, 1.0, [1.0]
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            rate = (accepted + self._WEIGHT * rate) / (tried + self._WEIGHT)
            prefix *= rate
            taus.append(taus[-1] + prefix)
        return taus

    def doubt(self, sequences: int) -> float:
        """Return the relative variance of the estimates of log τ: higher with few blocks and after idle rounds.

        The mean of many sequences (more than four) changes less from one text to the next.
        """
        return 0.2 / (self.tried[0] + 1) + 2e-4 * min(self.idle, 1000) / max(1.0, math.sqrt(sequences) / 2)
