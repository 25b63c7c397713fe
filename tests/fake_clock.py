"""A clock that goes on when everybody waits for it: hours pass in milliseconds, and always in the same order.

`run` gives a coroutine an event loop of its own. Until it has ended, `time.monotonic` is that loop's time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

Result = TypeVar("Result")
# Of real time: nobody is left to wake the loop up.
_STUCK_SECONDS = 10.0


class _Selector(selectors.DefaultSelector):
    """Instead of waiting it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(_STUCK_SECONDS if timeout is None else 0)
        if not events:
            assert timeout is not None, "every task waits for something that never comes"
            self.now += max(0.0, timeout)
        return events


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end in time of its own."""
    selector = _Selector()
    with (
        patch.object(time, "monotonic", lambda: selector.now),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        return runner.run(main)
