"""One draft's end of the activations: a bounded queue between the model thread and a gRPC stream.

Rows lie in the ring of shared memory where the draft has opened one, and where it is full, travel inline. By the line
they get there without passing an event loop. A slow
subscriber never blocks a step. When its queue is over the limit everything queued is dropped, and once the stream has
caught up it asks for a replay, which makes up for all that was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Rows

from spire.rpc.carrier import Ring
from spire.rpc.line import Line
from spire.rpc.tensors import put_shape, to_wire, without_data
from spire.v1 import draft_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.delivery import Deliver, Delivery, frames

MAX_FRAME_BYTES = 1024 * 1024
MAX_PENDING_BYTES = 32 * 1024 * 1024
# A message takes at most this part of a ring: the next is written while it is read. A round of an 8B target at 64
# sequences, 14.4 MB, is one message in a ring of 44 MiB.
_RING_PART = 3


class Subscriber:
    """Lives on the event loop; only `deliver` is called from the model thread."""

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
        # A replay may be larger than the queue is meant to get: it counts on top.
        self._limit = max_bytes
        self._behind = False
        self._ended: list[str] = []
        self._closed = False
        self._something = asyncio.Event()
        # Where the draft has opened one. Set by another thread.
        self.line: Line | None = None

    def deliver(self, delivery: Delivery) -> None:
        """Called by the model thread: the rows are copied here. It may wait for a GPU, never for a draft."""
        if self._closed or self._loop.is_closed():
            return
        if not (self.line and self._sent_by(self.line, delivery)):
            self._loop.call_soon_threadsafe(self._take, list(self._encode(delivery)), delivery.whole_replay)

    def _sent_by(self, line: Line, delivery: Delivery) -> bool:
        """Whether it went by the line: new rows alone do, where none are still on their way by gRPC. The ring tells."""
        ring, rows = self._ring, delivery.rows
        if ring is None or not ring.all_read or delivery.whole_replay or delivery.ended:
            return False
        if not 0 < rows.nbytes <= ring.size // _RING_PART:
            return False
        there, place = ring.claim(rows.shape, rows.dtype)
        if there is None:
            return False
        rows.gather(there)
        ring.settle()
        told = draft_pb2.Told()
        message = told.activations
        message.spans.extend(delivery.spans)
        put_shape(message.rows, rows.dtype, rows.shape)
        message.slice.position, message.slice.length = place.position, place.length
        message.tokens.extend(delivery.tokens)
        return line.send(told.SerializeToString())

    def _encode(self, delivery: Delivery) -> Iterator[pb.ActivationsResponse]:
        if delivery.ended:
            yield pb.ActivationsResponse(ended=delivery.ended)
        if self._ring is None:
            yield from _inline(delivery)
            return
        for part in frames(delivery, self._ring.size // _RING_PART):
            rows_RND = part.rows.rows_RND
            place = self._ring.put(rows_RND)
            if place.length:
                rows = without_data(rows_RND)
                yield pb.ActivationsResponse(spans=part.spans, rows=rows, tokens=part.tokens, slice=place)
            else:
                yield from _inline(part, place)

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
        """What to send next, until closed."""
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
