"""One draft's subscription to activations: a bounded queue between the model thread and a gRPC stream.

Rows are written to the draft's ring if there is one, and travel inline while the ring is full. A slow draft never
blocks a step: when its queue exceeds the limit, everything queued is dropped, and once the stream has caught up the
subscriber asks for a replay, which restores everything that was dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence as Rows

from spire.rpc.carrier import Ring
from spire.rpc.tensors import to_wire, without_data
from spire.v1 import verifier_pb2 as pb
from verifier_service.feed.delivery import Deliver, Delivery, frames

MAX_FRAME_BYTES = 1024 * 1024
MAX_PENDING_BYTES = 32 * 1024 * 1024
# A message takes at most 1 / _RING_PART of a ring, so that the next one can be written while the draft reads it. In a
# ring of 44 MiB a round of an 8B target at 64 sequences (14.4 MB) is one message.
_RING_PART = 3


class Subscriber:
    """The queue of activations for one draft. Runs on the event loop; only `deliver` is called by the model thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ask_replay: Callable[[Deliver], object],
        ring: Ring | None = None,
        max_bytes: int = MAX_PENDING_BYTES,
    ):
        self._loop, self._ask_replay, self._ring, self._max_bytes = loop, ask_replay, ring, max_bytes
        self._pending: deque[pb.ActivationsResponse] = deque()
        self._pending_bytes = 0
        # The most bytes that may be queued: `max_bytes` plus the bytes that the last whole replay queued.
        self._limit = max_bytes
        self._behind = False
        self._ended: list[str] = []
        self._closed = False
        self._something = asyncio.Event()

    def deliver(self, delivery: Delivery) -> None:
        """Copy and queue a delivery, on the model thread. The copy may wait for a GPU, but never for a draft."""
        if self._closed or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._take, list(self._encode(delivery)), delivery.whole_replay)

    def _encode(self, delivery: Delivery) -> Iterator[pb.ActivationsResponse]:
        if delivery.ended:
            yield pb.ActivationsResponse(ended=delivery.ended)
        if self._ring is None:
            yield from _inline(delivery)
            return
        for part in frames(delivery, self._ring.size // _RING_PART):
            there, place = self._ring.claim(part.rows.shape, part.rows.dtype)
            if there is None:
                yield from _inline(part, place)
                continue
            part.rows.gather(there)
            self._ring.settle()
            yield pb.ActivationsResponse(spans=part.spans, rows=without_data(there), tokens=part.tokens, slice=place)

    def close(self) -> None:
        self._closed = True
        self._something.set()

    def _take(self, messages: Rows[pb.ActivationsResponse], whole_replay: bool) -> None:
        if whole_replay:
            self._drop()
            self._behind = False
            if self._ended:
                self._push(pb.ActivationsResponse(ended=self._ended))
                self._ended = []
        for message in messages:
            if self._behind:
                self._ended += message.ended
            else:
                self._push(message)
        if whole_replay:
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
        """Yield the messages to send until the subscriber is closed."""
        while not self._closed:
            while self._pending:
                message = self._pending.popleft()
                self._pending_bytes -= len(message.rows.data)
                yield message
            if self._behind:
                self._ask_replay(self.deliver)
            self._something.clear()
            if not self._closed and not self._pending:
                await self._something.wait()


def _inline(delivery: Delivery, place: pb.RingSlice | None = None) -> Iterator[pb.ActivationsResponse]:
    for part in frames(delivery, MAX_FRAME_BYTES):
        rows = to_wire(part.rows.rows_RND)
        yield pb.ActivationsResponse(spans=part.spans, rows=rows, tokens=part.tokens, slice=place)
