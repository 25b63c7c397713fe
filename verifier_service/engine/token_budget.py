"""The number of positions in a step: as given, or as many as a step computes in about the time that it should take.

The median of the last steps counts, so that one step on a busy machine changes little. Does not know: which sequences
the positions belong to.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# Seconds that a step with prompts should take, or twice a step without prompts if that is longer: the sequences that
# are decoded in the same step wait for it.
_GOAL_SECONDS = 0.5
# A step with fewer than _FEWEST positions costs nearly as much, above all on a busy machine.
_FEWEST, _MOST = 64, 512
_REMEMBERED = 8


class TokenBudget:
    """The `positions` of a step: the number `given`, or if that is 0, a number derived from measured steps."""

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
            self.positions = max(_FEWEST, min(self._that_fit(), trusted, _MOST))

    def _that_fit(self) -> int:
        plain = median(self._plain)
        for_prompts, goal = median(self._seconds) - plain, max(_GOAL_SECONDS, 2 * plain) - plain
        return int(min(_MOST, median(self._sizes) * goal / for_prompts)) if for_prompts > 0 else _MOST
