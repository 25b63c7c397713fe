"""A thread pool, shared fairly between clients, for work of client-chosen size, which must not block the event loop.

Python code releases the interpreter lock (GIL) periodically. A native call must release the lock itself, as tokenizers
do for batches, or be short.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from spire.service.fair_pool import FairPool

Result = TypeVar("Result")

# The name of the API key that the current request came with, or the client's address if no keys are needed.
asker: ContextVar[str] = ContextVar("asker", default="")
# The largest request, in bytes, whose work takes less time than passing it to a thread.
SMALL = 2000
_POOL = FairPool(4, "aside")
_LONGEST_STRETCH = 0.004


async def aside(function: Callable[..., Result], *args: Any) -> Result:
    """Run a function in a thread pool and return its result. If cancelled while queued, the function never runs."""
    return await _POOL.run(asker.get(), function, *args)


async def by_size(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Return the function's result, computed here if `size` (bytes of the request) is small, else in a thread pool."""
    return function(*args) if size <= SMALL else await aside(function, *args)


class Stretch:
    """Timer of one task's work on the event loop: `breathe` yields to other tasks once the work has taken too long."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def breathe(self) -> None:
        if time.perf_counter() - self._began > _LONGEST_STRETCH:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
