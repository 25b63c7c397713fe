"""A thread pool that several clients ("askers") share fairly: each has its own queue, served round-robin.

An asker occupies at most one thread, so that in a pool of several threads another asker's job starts at once. A job
whose future is cancelled before its start never runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")
# A function and the future of its result.
_Job = tuple[Callable[[], Any], Future[Any]]


class FairPool:
    """A pool of `threads` daemon threads, started with the first job, that serves one queue per client in turns."""

    def __init__(self, threads: int, name: str):
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        # In order of turns. The queue of an asker that occupies a thread is skipped.
        self._queues: dict[str, deque[_Job]] = {}
        self._served: set[str] = set()
        self._changed = threading.Condition()

    async def run(self, asker: str, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function` as a job of `asker` and return its result. A job cancelled before its start never runs."""
        return await asyncio.wrap_future(self.submit(asker, function, *args))

    def submit(self, asker: str, function: Callable[..., Result], *args: Any) -> Future[Result]:
        done: Future[Result] = Future()
        with self._changed:
            self._queues.setdefault(asker, deque()).append((partial(function, *args), done))
            self._changed.notify()
            if not self._threads[0].ident:
                for thread in self._threads:
                    thread.start()
        return done

    def _serve(self) -> None:
        while True:
            asker, (work, done) = self._next()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:  # panics of libraries are no Exception
                    done.set_exception(error)
            del work, done
            with self._changed:
                self._served.discard(asker)
                self._changed.notify()

    def _next(self) -> tuple[str, _Job]:
        """Wait for a job. Return the asker whose turn it is and its first job; its other jobs wait for a later turn."""
        with self._changed:
            while (asker := next((one for one in self._queues if one not in self._served), None)) is None:
                self._changed.wait()
            queue = self._queues.pop(asker)
            job = queue.popleft()
            if queue:
                self._queues[asker] = queue
            self._served.add(asker)
            return asker, job
