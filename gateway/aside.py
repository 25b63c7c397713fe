"""Work whose size a client chooses, off the event loop: on threads that all who ask share fairly.

Python's own code gives the interpreter back by itself. Whatever is called in one piece there must let go of it, as
tokenizers do with batches, or be short.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from spire.fair_pool import FairPool

Result = TypeVar("Result")

# Who asks: an API key's name, or where keys are not asked for, a client's address.
asker: ContextVar[str] = ContextVar("asker", default="")
# What a request of so many bytes asks for is done sooner than handed over.
SMALL = 2000
_POOL = FairPool(4, "aside")
_LONGEST_STRETCH = 0.004


async def aside(function: Callable[..., Result], *args: Any) -> Result:
    """What the function returns or raises, on another thread. Cancelled in time, it is not called."""
    return await _POOL.run(asker.get(), function, *args)


async def by_size(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """The same; at once where there is little to do."""
    return function(*args) if size <= SMALL else await aside(function, *args)


class Stretch:
    """One task's work on the event loop: it lets others go on whenever it has taken long enough."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def breathe(self) -> None:
        if time.perf_counter() - self._began > _LONGEST_STRETCH:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
