"""What one thread is given: by other threads, and by lines, whose sockets it reads itself.

A thread for each line, which only handed on what comes, would have to be woken first, where all processors are busy:
with that a round of 16 sequences took a twentieth longer.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from spire.rpc.line import Line

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """`put` and `read` may be called by any thread; `take` by the one that it belongs to."""

    def __init__(self) -> None:
        self._given: deque[Item] = deque()
        # By file descriptor: a line, what becomes of a packet of it, and what to do at its end.
        self._lines: dict[int, tuple[Line, Callable[[bytes], Item], Callable[[], object]]] = {}
        self._waking, self._woken = socket.socketpair()
        for end in (self._waking, self._woken):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._asleep = False

    def __len__(self) -> int:
        """How much other threads have put that was not taken."""
        return len(self._given)

    def put(self, item: Item) -> None:
        self._given.append(item)
        if self._asleep:
            self._wake()

    def read(self, line: Line, made: Callable[[bytes], Item], ended: Callable[[], object]) -> None:
        """Take what this line brings as what is `made` of it, and call `ended` at its end: both on the thread."""
        self._lines[line.fileno()] = line, made, ended
        self._poll.register(line.fileno(), select.POLLIN)
        self._wake()

    def take(self, most: int, patience: float | None) -> list[Item]:
        """At most so much of what there is. Waits for something: for so many seconds, or with None for any time."""
        brought = self._brought(patience) if self._lines or not self._given else []
        return brought + [self._given.popleft() for _ in range(min(most - len(brought), len(self._given)))]

    def _brought(self, patience: float | None) -> list[Item]:
        """A packet of each line that has some, after waiting for one or for what is given."""
        # Before looking: whoever puts something from now on wakes this thread.
        self._asleep = True
        milliseconds = 0 if self._given else None if patience is None else 1000 * patience
        ready = self._poll.poll(milliseconds)
        self._asleep = False
        brought = []
        for descriptor, _ in ready:
            if descriptor == self._woken.fileno():
                self._woken.recv(4096)
                continue
            line, made, ended = self._lines[descriptor]
            if packet := line.receive():
                brought.append(made(packet))
            else:
                self._poll.unregister(descriptor)
                del self._lines[descriptor]
                line.free()
                ended()
        return brought

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._waking.send(b"\0")
