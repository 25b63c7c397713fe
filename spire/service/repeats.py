"""Limit the size of logs: the first few lines of each kind per minute are written, further ones are only counted.

Debug lines are never dropped: a debug log is requested, and has a line for every request.
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
# A bound, because libraries may log a different text every time.
_MOST_KINDS = 1000


@dataclass
class _Kind:
    since: float
    count: int = 0


class Repeats:
    """Counter of log lines by kind, which drops lines beyond a limit per minute. Thread-safe. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kinds: dict[Hashable, _Kind] = {}
        self._counting = threading.Lock()

    def count(self, kind: Hashable) -> int | None:
        """Count a log line. Return None if the line must be dropped, else the number of its kind dropped before."""
        now = self._clock()
        with self._counting:
            known = self._kinds.get(kind)
            left_out = 0
            if known is None or now - known.since >= SECONDS:
                left_out = max(0, known.count - MOST) if known else 0
                if len(self._kinds) >= _MOST_KINDS:
                    self._kinds.clear()
                known = self._kinds[kind] = _Kind(now)
            known.count += 1
            return left_out if known.count <= MOST else None

    def processor(self, _: WrappedLogger, level: str, event: EventDict) -> EventDict:
        """structlog processor that drops frequent lines. The kind of a line is its level, event and peer."""
        if level == "debug":
            return event
        left_out = self.count((level, event.get("event"), event.get("peer")))
        if left_out is None:
            raise structlog.DropEvent
        return {**event, "left_out": left_out} if left_out else event

    def filter(self, record: logging.LogRecord) -> bool:
        """logging filter that drops frequent records. A record's kind is its logger, level and unformatted message."""
        left_out = self.count((record.name, record.levelno, record.msg))
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more like this before)"
        return left_out is not None
