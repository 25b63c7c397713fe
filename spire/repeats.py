"""Logs that stay bounded: of one kind of line the first few of a minute are written, the rest are counted.

What it does not know: what a debug log holds. It is asked for, with a line for every request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import structlog
from structlog.typing import EventDict, WrappedLogger

MOST, SECONDS = 20, 60.0
# Libraries may log what is different each time.
_MOST_KINDS = 1000


@dataclass
class _Kind:
    since: float
    count: int = 0


class Repeats:
    """Shared by all that log in a process. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kinds: dict[Hashable, _Kind] = {}
        self._counting = threading.Lock()

    def count(self, kind: Hashable) -> int | None:
        """How many lines of this kind were left out before this one; None where this one is to be left out too."""
        now = self._clock()
        with self._counting:
            known = self._kinds.get(kind)
            left_out = 0
            if known is None or now - known.since >= SECONDS:
                left_out = max(0, known.count - MOST) if known else 0
                known = self._new(kind, now)
            known.count += 1
            return left_out if known.count <= MOST else None

    def _new(self, kind: Hashable, now: float) -> _Kind:
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = made = _Kind(now)
        return made

    def processor(self, _: WrappedLogger, level: str, event: EventDict) -> EventDict:
        """For structlog. A line is of the kind of all with its event, of the same peer where it is about one."""
        if level == "debug":
            return event
        left_out = self.count((level, event.get("event"), event.get("peer")))
        if left_out is None:
            raise structlog.DropEvent
        return {**event, "left_out": left_out} if left_out else event

    def filter(self, record: logging.LogRecord) -> bool:
        """For a handler of the standard library: what others log, by what they log before its values are filled in."""
        left_out = self.count((record.name, record.levelno, record.msg))
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more like this before)"
        return left_out is not None
