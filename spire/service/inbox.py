"""A queue with many producer threads and one consumer thread."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A first-in, first-out queue. Any thread may call `put`; only the owning thread may call `take`."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Item] = SimpleQueue()

    def __len__(self) -> int:
        return self._given.qsize()

    def put(self, item: Item) -> None:
        self._given.put(item)

    def take(self, most: int, patience: float | None) -> list[Item]:
        """Remove and return up to `most` items. Wait up to `patience` seconds (None: no limit) for the first item."""
        taken: list[Item] = []
        with contextlib.suppress(Empty):
            if most > 0:
                taken.append(self._given.get(timeout=patience))
            while len(taken) < most:
                taken.append(self._given.get_nowait())
        return taken
