"""How many positions a step takes where nobody has said: as many as take about as long as a step should.

Medians of the last steps count, so that one in which the machine was busy changes little. What it does not know: whose
positions they are.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# Seconds that a step with prompts should take, or twice one without, where that is longer: what is decoded beside them
# waits for it.
_GOAL_SECONDS = 0.5
# With fewer a step costs nearly as much as with these, on a busy machine above all.
_FEWEST, _MOST = 64, 512
_REMEMBERED = 8


class TokenBudget:
    """`positions` of a step: the number that was `given`, or with 0 what measured steps say."""

    def __init__(self, given: int):
        self._given = given
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._plain: deque[float] = deque([0.0], maxlen=_REMEMBERED)
        self.positions = given or _FEWEST

    def observe_plain(self, seconds: float) -> None:
        """A step without prompts took so long."""
        self._plain.append(seconds)

    def observe(self, positions: int, seconds: float) -> None:
        """A step that read prompts took so long."""
        if not self._given:
            self._sizes.append(positions)
            self._seconds.append(seconds)
            # Beyond what is now, and twice what was measured, nothing is foreseen.
            trusted = max(self.positions, 2 * max(self._sizes))
            self.positions = max(_FEWEST, min(self._that_fit(), trusted, _MOST))

    def _that_fit(self) -> int:
        plain = median(self._plain)
        for_prompts, goal = median(self._seconds) - plain, max(_GOAL_SECONDS, 2 * plain) - plain
        return int(min(_MOST, median(self._sizes) * goal / for_prompts)) if for_prompts > 0 else _MOST
