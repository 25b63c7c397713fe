"""How many positions a step takes where nobody has said: as many as take about as long as a step should.

Seconds of steps that read prompts are fitted by a line over their positions. What it does not know: whose they are.
"""

from __future__ import annotations

from collections import deque
from statistics import linear_regression

# Seconds that a step with prompts should take, or twice one with hardly any, where that is longer: what is decoded
# beside them waits for it.
_GOAL_SECONDS = 0.5
_FEWEST, _AT_FIRST, _MOST = 16, 64, 512
_REMEMBERED = 32


class TokenBudget:
    """`positions` of a step: the number that was `given`, or with 0 what measured steps say."""

    def __init__(self, given: int):
        self._given = given
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self.positions = given or _AT_FIRST

    def observe(self, positions: int, seconds: float) -> None:
        """A step that read prompts took so long."""
        if not self._given:
            self._steps.append((positions, seconds))
            # Twice the largest step that was measured is the farthest that a line is trusted.
            trusted = max(_AT_FIRST, 2 * max(measured for measured, _ in self._steps))
            self.positions = max(_FEWEST, min(self._that_fit(), trusted, _MOST))

    def _that_fit(self) -> int:
        fixed, each = self._line()
        goal = max(_GOAL_SECONDS, 2 * fixed)
        return int((goal - fixed) / each) if each * _MOST > goal - fixed else _MOST

    def _line(self) -> tuple[float, float]:
        """Seconds of a step, and of each of its positions: neither is negative."""
        sizes, seconds = [float(size) for size, _ in self._steps], [taken for _, taken in self._steps]
        in_proportion = 0.0, sum(seconds) / sum(sizes)
        if min(sizes) == max(sizes):
            return in_proportion
        each, fixed = linear_regression(sizes, seconds)
        if each <= 0:
            return sum(seconds) / len(seconds), 0.0
        return (fixed, each) if fixed >= 0 else in_proportion
