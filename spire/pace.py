"""The pace of a model: how long its steps take, and the limits that follow from that.

A limit is a multiple of what a step takes, and never below a floor: nobody is stuck who computes as fast as ever. One
thread reports its steps; any thread may ask. What it does not know: what a step computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A limit is so many times what a step takes.
MULTIPLE = 8
# Steps of a kind and size that are remembered.
_REMEMBERED = 8


def limit(step_seconds: float, floor: float) -> float:
    """Seconds after which what waits for steps of `step_seconds` has waited in vain."""
    return max(floor, MULTIPLE * step_seconds)


class Pace:
    """Steps of one thread, grouped by kind and by size, in powers of two.

    The median of a group's last steps is what its next one is expected to take, so that one step in which the machine
    slept sets no limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._steps: dict[tuple[str, int], deque[float]] = {}
        self._medians: dict[tuple[str, int], float] = {}
        self._longest = self._expected = 0.0
        self._since: float | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds that a step of any kind takes, and the one under way is expected to take; 0 before the first."""
        return max(self._longest, self._expected)

    @property
    def seconds_busy(self) -> float:
        """Seconds since the thread last began something, 0 while it waits for work."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def is_stuck(self, floor: float) -> bool:
        return self.seconds_busy > limit(self.step_seconds, floor)

    def work(self) -> None:
        """The thread begins something."""
        self._since = self._clock()

    def rest(self) -> None:
        """The thread waits for work."""
        self._since = None

    @contextmanager
    def step(self, kind: str, size: int) -> Iterator[None]:
        """The thread takes a step of `size` positions inside this block. One that raises is not counted."""
        self._expected = self.expected(kind, size)
        self.work()
        began = self._clock()
        try:
            yield
            self.observe(kind, size, self._clock() - began)
        finally:
            self._expected = 0.0
            self.work()

    def observe(self, kind: str, size: int, seconds: float) -> None:
        """A step of `size` positions took `seconds`."""
        group = kind, size.bit_length()
        steps = self._steps.setdefault(group, deque(maxlen=_REMEMBERED))
        steps.append(seconds)
        self._medians[group] = sorted(steps)[len(steps) // 2]
        self._longest = max(self._medians.values())

    def expected(self, kind: str, size: int) -> float:
        """Seconds such a step takes: as its like did, else in proportion to smaller ones; 0 if none is known."""
        bits = size.bit_length()
        if (kind, bits) in self._medians:
            return self._medians[kind, bits]
        known = {other for _, other in self._medians}
        if not known:
            return 0.0
        nearest = max((other for other in known if other <= bits), default=min(known))
        seconds = max(median for (_, other), median in self._medians.items() if other == nearest)
        return seconds * 2.0 ** max(0, bits - nearest)
