"""The step times of a model thread, and the time limits derived from them.

A limit is a multiple of the step time and never below a floor, so that a slow but steady thread does not count as
stuck. One thread reports its steps; any thread may read. Does not know: what a step computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A limit is this many times the step time.
MULTIPLE = 8
# Remembered steps per kind and size.
_REMEMBERED = 8


def limit(step_seconds: float, floor: float) -> float:
    """Return the timeout in seconds for a step: eight times `step_seconds`, the usual time, but at least `floor`."""
    return max(floor, MULTIPLE * step_seconds)


class Pace:
    """Step times of one thread, grouped by kind and by size in powers of two.

    The expected time of a step is the median of the last steps in its group, so that a single outlier, such as a
    sleeping machine, does not affect limits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._steps: dict[tuple[str, int], deque[float]] = {}
        self._medians: dict[tuple[str, int], float] = {}
        self._longest = self._expected = 0.0
        self._since: float | None = None

    @property
    def step_seconds(self) -> float:
        """Longest median of any kind of step or, if longer, expected time of the current step (seconds; 0 at first)."""
        return max(self._longest, self._expected)

    @property
    def seconds_busy(self) -> float:
        """Seconds since the thread last began or ended a step or other work; 0 while the thread waits for work."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def is_stuck(self, floor: float) -> bool:
        return self.seconds_busy > limit(self.step_seconds, floor)

    def work(self) -> None:
        """Record that the thread begins to work, or makes progress within a step."""
        self._since = self._clock()

    def rest(self) -> None:
        """Record that the thread waits for work."""
        self._since = None

    @contextmanager
    def step(self, kind: str, size: int, forwards: int = 1) -> Iterator[None]:
        """Time the enclosed block as a step: a number of `forwards` over `size` positions, which call `work` between.

        A block that raises an exception is not recorded.
        """
        self._expected = self.expected(kind, size, forwards)
        self.work()
        began = self._clock()
        try:
            yield
            self.observe(kind, size, self._clock() - began)
        finally:
            self._expected = 0.0
            self.work()

    def observe(self, kind: str, size: int, seconds: float) -> None:
        """Record that a step of `size` positions took `seconds`."""
        group = kind, size.bit_length()
        steps = self._steps.setdefault(group, deque(maxlen=_REMEMBERED))
        steps.append(seconds)
        self._medians[group] = sorted(steps)[(len(steps) - 1) // 2]  # of two, the one that is no outlier
        self._longest = max(self._medians.values())

    def expected(self, kind: str, size: int, forwards: int = 1) -> float:
        """Return the expected seconds of a step: the median of similar steps, else scaled from others; 0 if unknown."""
        bits = size.bit_length()
        if (kind, bits) in self._medians:
            return self._medians[kind, bits]
        known = {other for _, other in self._medians}
        if not known:
            return 0.0
        nearest = max((other for other in known if other <= bits), default=min(known))
        seconds = max(median for (_, other), median in self._medians.items() if other == nearest)
        return forwards * seconds * 2.0 ** max(0, bits - nearest)
