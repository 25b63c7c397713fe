"""One draft's end of the activations: a bounded queue between the model thread and a gRPC stream.

A slow subscriber never blocks a step. When its queue is over the limit everything queued is dropped, and once the
stream has caught up it asks for a replay, which makes up for all that was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from spire.v1 import verifier_pb2 as pb
from verifier_service.activations import Delivery

MAX_PENDING_BYTES = 32 * 1024 * 1024


class Subscriber:
    """Lives on the event loop; only `deliver` is called from the model thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ask_replay: Callable[[], None], max_bytes: int = MAX_PENDING_BYTES
    ):
        self._loop, self._ask_replay, self._max_bytes = loop, ask_replay, max_bytes
        self._pending: deque[pb.ActivationsResponse] = deque()
        self._pending_bytes = 0
        # A replay may be larger than the queue is meant to get: it counts on top.
        self._limit = max_bytes
        self._behind = False
        self._ended: list[str] = []
        self._closed = False
        self._something = asyncio.Event()

    def deliver(self, delivery: Delivery) -> None:
        """Called by the model thread. Never blocks, never fails."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, delivery)

    def close(self) -> None:
        self._closed = True
        self._something.set()

    def _take(self, delivery: Delivery) -> None:
        if delivery.whole_replay:
            self._drop()
            self._behind = False
            if self._ended:
                self._push(pb.ActivationsResponse(ended=self._ended))
                self._ended = []
        for message in delivery.messages:
            if self._behind:
                self._ended += message.ended
            else:
                self._push(message)
        if delivery.whole_replay:
            self._limit = self._max_bytes + self._pending_bytes
        elif self._pending_bytes > self._limit:
            self._drop()
            self._behind = True
        self._something.set()

    def _push(self, message: pb.ActivationsResponse) -> None:
        self._pending.append(message)
        self._pending_bytes += len(message.rows.data)

    def _drop(self) -> None:
        for message in self._pending:
            self._ended += message.ended
        self._pending.clear()
        self._pending_bytes = 0

    async def messages(self) -> AsyncIterator[pb.ActivationsResponse]:
        """What to send next, until closed."""
        while not self._closed:
            while self._pending:
                message = self._pending.popleft()
                self._pending_bytes -= len(message.rows.data)
                yield message
            if self._behind:
                self._ask_replay()
            self._something.clear()
            if not self._closed and not self._pending:
                await self._something.wait()
