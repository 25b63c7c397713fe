"""Threads, shared fairly between askers, for work whose size a client chooses: it must not block the event loop.

Python code releases the interpreter lock by itself. A native call must release it too, as tokenizers do for batches,
or be short.
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
# The largest request, in bytes, whose work takes less time than handing it to a thread.
SMALL = 2000
_POOL = FairPool(4, "aside")
_LONGEST_STRETCH = 0.004


async def aside(function: Callable[..., Result], *args: Any) -> Result:
    """Run a function on another thread and return its result. A caller cancelled before that never has it called."""
    return await _POOL.run(asker.get(), function, *args)


async def by_size(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Run the function at once if `size` (bytes of the request) is at most SMALL, else on another thread."""
    return function(*args) if size <= SMALL else await aside(function, *args)


class Stretch:
    """The work of one task on the event loop: `breathe` yields to other tasks if the work has run for too long."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def breathe(self) -> None:
        if time.perf_counter() - self._began > _LONGEST_STRETCH:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
