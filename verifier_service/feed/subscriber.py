"""One draft's subscription: a bounded queue between the model thread and the gRPC stream of the draft.

The queue holds activations and draft requests in the order in which they came; a request joins the activations before
it in one packet, if those have not been sent yet. Rows are written to the draft's ring if there is one, and travel
inline while the ring is full. A slow draft never blocks a step: when its queue exceeds the limit, all activations
queued are dropped, and once the stream has caught up the subscriber asks for a replay, which restores everything that
was dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence as Rows

from spire.rpc.carrier import Ring
from spire.rpc.tensors import to_wire, without_data
from spire.v1 import draft_pb2 as pb, verifier_pb2
from verifier_service.feed.delivery import Deliver, Delivery, frames

MAX_FRAME_BYTES = 1024 * 1024
MAX_PENDING_BYTES = 32 * 1024 * 1024
# A message takes at most 1 / _RING_PART of a ring, so that the next one can be written while the draft reads it. In a
# ring of 44 MiB a round of an 8B target at 64 sequences (14.4 MB) is one message.
_RING_PART = 3


class Subscriber:
    """The packets for one draft. Runs on the event loop; the model thread calls only `deliver` and `request`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ask_replay: Callable[[Deliver], object],
        ring: Ring | None = None,
        max_bytes: int = MAX_PENDING_BYTES,
    ):
        self._loop, self._ask_replay, self._ring, self._max_bytes = loop, ask_replay, ring, max_bytes
        self._pending: deque[pb.DraftPacket] = deque()
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

    def request(self, request: pb.DraftRequest | None) -> None:
        """Queue a copy of a request, or end the stream if None, on the model thread, which may reuse the message."""
        if self._closed or self._loop.is_closed():
            return
        if request is None:
            self._loop.call_soon_threadsafe(self.close)
        else:
            self._loop.call_soon_threadsafe(self._take_request, pb.DraftPacket(request=request))

    def _encode(self, delivery: Delivery) -> Iterator[pb.DraftPacket]:
        if delivery.ended:
            yield pb.DraftPacket(ended=delivery.ended)
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
            yield pb.DraftPacket(spans=part.spans, rows=without_data(there), tokens=part.tokens, slice=place)

    def close(self) -> None:
        self._closed = True
        self._something.set()

    def _take_request(self, packet: pb.DraftPacket) -> None:
        if self._pending and not self._pending[-1].HasField("request"):
            self._pending[-1].request.CopyFrom(packet.request)
        else:
            self._push(packet)
        self._something.set()

    def _take(self, packets: Rows[pb.DraftPacket], whole_replay: bool) -> None:
        if whole_replay:
            self._drop()
            self._behind = False
            if self._ended:
                self._push(pb.DraftPacket(ended=self._ended))
                self._ended = []
        for packet in packets:
            if self._behind:
                self._ended += packet.ended
            else:
                self._push(packet)
        if whole_replay:
            self._limit = self._max_bytes + self._pending_bytes
        elif self._pending_bytes > self._limit:
            self._drop()
            self._behind = True
        self._something.set()

    def _push(self, packet: pb.DraftPacket) -> None:
        self._pending.append(packet)
        self._pending_bytes += len(packet.rows.data)

    def _drop(self) -> None:
        """Drop the activations in the queue. Requests stay, because the engine waits for their replies."""
        packets, self._pending, self._pending_bytes = self._pending, deque(), 0
        for packet in packets:
            self._ended += packet.ended
            if packet.HasField("request"):
                self._push(pb.DraftPacket(request=packet.request))

    async def packets(self) -> AsyncIterator[pb.DraftPacket]:
        """Yield the packets to send until the subscriber is closed."""
        while not self._closed:
            while self._pending:
                packet = self._pending.popleft()
                self._pending_bytes -= len(packet.rows.data)
                yield packet
            if self._behind:
                self._ask_replay(self.deliver)
            self._something.clear()
            if not self._closed and not self._pending:
                await self._something.wait()


def _inline(delivery: Delivery, place: verifier_pb2.RingSlice | None = None) -> Iterator[pb.DraftPacket]:
    for part in frames(delivery, MAX_FRAME_BYTES):
        rows = to_wire(part.rows.rows_RND)
        yield pb.DraftPacket(spans=part.spans, rows=rows, tokens=part.tokens, slice=place)
