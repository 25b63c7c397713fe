"""The gRPC service for drafts: one stream a draft, with activations and draft requests to it, and its replies back.

Runs on the event loop. Does not know: what activations are kept, and when a draft is asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import grpc
import structlog
import torch

from spire.errors import InvalidRequest, OutOfCapacity, SpireError
from spire.rpc.carrier import OverwritingRingReader, Ring
from spire.rpc.cuda_ipc import gpu_of
from spire.rpc.errors import call_status
from spire.rpc.host import host_id
from spire.rpc.limits import MAX_FOLLOWERS, check_named
from spire.v1 import draft_pb2 as pb, draft_pb2_grpc as rpc, verifier_pb2
from verifier_service.engine.drafts import Drafts, check_draft_id
from verifier_service.engine.engine import VerifierEngine
from verifier_service.feed.feed import Taps
from verifier_service.feed.subscriber import Subscriber
from verifier_service.metrics import GRPC
from verifier_service.serve.names import Names

log = structlog.get_logger("verifier_service")

# The ring of activations holds a whole replay, or three rounds of an 8B target at 64 sequences; the ring of q holds
# four rounds of 64 sequences at k = 8 and a vocabulary of 4,096. A container has 64 MiB for both by default.
MAX_RING_BYTES, Q_RING_BYTES = 44 * 1024 * 1024, 18 * 1024 * 1024
# In a GPU's memory: four rounds of 64 sequences at k = 16 and 4,096 ids of a larger vocabulary.
GPU_Q_RING_BYTES = 128 * 1024 * 1024
# Seconds within which the first message of a stream has to come.
_SUBSCRIPTION_SECONDS = 10.0
# Seconds that a ring in a GPU's memory outlives its subscription.
_STILL_MAPPED_SECONDS = 10.0

Made = TypeVar("Made", Ring, OverwritingRingReader)


class Rings(NamedTuple):
    """The memory that verifier and draft share: for activations and for q. None where the bytes travel inline."""

    activations: Ring | None = None
    q: OverwritingRingReader | None = None

    @property
    def offer(self) -> pb.DraftPacket:
        ring, q_ring = (each.offer if each else verifier_pb2.Ring() for each in self)
        return pb.DraftPacket(ring=ring, q_ring=q_ring)


class DraftConnections(rpc.DraftingServicer):
    """Serves `spire.v1.Drafting`."""

    def __init__(
        self, engine: VerifierEngine, target: verifier_pb2.GetInfoResponse, drafts: Drafts, shared_memory: str
    ):
        self._engine, self._target, self._drafts, self._shared_memory = engine, target, drafts, shared_memory
        self._names = Names("draft")
        self._subscribers: dict[str, Subscriber] = {}
        # The number of streams by draft id: a newer one may begin before the older one has ended.
        self._following: Counter[str] = Counter()

    async def Follow(
        self, messages: AsyncIterator[pb.DraftMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DraftPacket]:
        try:
            request = await _subscription(messages)
            check_draft_id(request.draft_id)
            taps = Taps.read(request, self._target)
            if request.HasField("draft"):
                self._drafts.check(request.draft)
            with self._names.held(request.draft_id, context), self._counted(request.draft_id):
                async with self._followed(request, taps) as (subscriber, offer):
                    # Sequences that start after the draft has received the metadata are followed. The draft then
                    # forgets everything: the packets that follow begin with a replay.
                    await context.send_initial_metadata(())
                    if request.host:
                        yield offer
                    async with self._heard(request, subscriber, messages):
                        async for packet in subscriber.packets():
                            if packet.HasField("request"):
                                self._engine.metrics.draft_requests.labels(GRPC).inc()
                            yield packet
        except SpireError as error:
            await context.abort(call_status(error), str(error))

    @asynccontextmanager
    async def _heard(
        self, request: pb.Subscription, subscriber: Subscriber, messages: AsyncIterator[pb.DraftMessage]
    ) -> AsyncIterator[None]:
        """Announce a draft to gateways and take its messages inside the `with` block. Closes the subscriber when the
        draft closes its side. Raises InvalidRequest for a message that is wrong."""
        reader = asyncio.create_task(self._read(request.draft_id, messages))

        def ended(task: asyncio.Task[None]) -> None:
            subscriber.close()
            if not task.cancelled():
                task.exception()  # so that asyncio does not report it where the stream has ended for another reason

        reader.add_done_callback(ended)
        announced = self._drafts.followed_by(request.draft_id, request.draft)
        try:
            with announced if request.HasField("draft") else nullcontext():
                yield
            if reader.done():
                reader.result()
        finally:
            reader.cancel()

    async def _read(self, draft_id: str, messages: AsyncIterator[pb.DraftMessage]) -> None:
        """Pass the messages to the engine until the draft closes its side."""
        async for message in _readable(messages):
            match message.WhichOneof("body"):
                case "reply":
                    self._engine.take_reply(draft_id, message.reply)
                case "resync":
                    check_named("a Resync", len(message.resync.sequence_ids))
                    self._engine.call(self._engine.replay, draft_id, list(message.resync.sequence_ids))
                case "working":
                    self._engine.call(self._engine.draft_requests.works, draft_id)
                case other:
                    raise InvalidRequest(f"after its subscription a draft sends reply, resync or working, not {other}")

    @contextmanager
    def _counted(self, draft_id: str) -> Iterator[None]:
        """Count a subscription inside the `with` block. Raises OutOfCapacity if too many drafts are subscribed."""
        if draft_id not in self._following and len(self._following) >= MAX_FOLLOWERS:
            raise OutOfCapacity(f"{MAX_FOLLOWERS} drafts follow this verifier already: that is the most it takes")
        self._following += Counter([draft_id])
        try:
            yield
        finally:
            self._following -= Counter([draft_id])

    @asynccontextmanager
    async def _followed(self, request: pb.Subscription, taps: Taps) -> AsyncIterator[tuple[Subscriber, pb.DraftPacket]]:
        """Subscribe a draft inside the `with` block. Yields the subscriber, and an offer of the rings."""
        near, draft_id = request.host and request.host == host_id(), request.draft_id
        rings = await asyncio.to_thread(self._share, taps, request.gpu) if near else Rings()
        subscriber = self._new_subscriber(draft_id, taps, rings.activations)
        if rings.q:
            self._engine.q_rings[draft_id] = rings.q
        try:
            self._engine.call(self._engine.subscribe, draft_id, taps, subscriber.deliver)
            connected = self._engine.call(self._engine.draft_requests.connect, draft_id, subscriber.request)
            await asyncio.wrap_future(connected)
            yield subscriber, rings.offer
        finally:
            if self._subscribers.get(draft_id) is subscriber:
                del self._subscribers[draft_id]
            self._engine.call(self._engine.draft_requests.disconnect, draft_id, subscriber.request)
            self._engine.call(self._engine.publisher.unsubscribe, draft_id, subscriber.deliver)
            if self._engine.q_rings.get(draft_id) is rings.q:
                self._engine.q_rings.pop(draft_id, None)
            # Memory of a GPU must not be freed while the draft maps it; the draft soon learns of the stream's end.
            mapped = [ring.gpu_memory for ring in rings if ring and ring.gpu_memory is not None]
            asyncio.get_running_loop().call_later(_STILL_MAPPED_SECONDS, mapped.clear)

    def _share(self, taps: Taps, gpu: str) -> Rings:
        """Create the rings for a draft on this host, for activations (if it taps layers) and q. Blocks the thread."""
        size, device = min(MAX_RING_BYTES, self._engine.publisher.replay_bytes(taps)), self._engine.steps.device
        ring = of_q = None
        if gpu and gpu == gpu_of(device):
            ring = self._made(Ring, size, device)
            of_q = self._made(OverwritingRingReader, GPU_Q_RING_BYTES, device)
        return Rings(ring or self._made(Ring, size), of_q or self._made(OverwritingRingReader, Q_RING_BYTES))

    def _made(self, kind: type[Made], size: int, gpu: torch.device | None = None) -> Made | None:
        try:
            return kind(Path(self._shared_memory), size, gpu) if self._shared_memory and size else None
        except OSError as error:
            log.warning("no shared memory for a draft", directory=self._shared_memory, bytes=size, error=str(error))
            return None

    def _new_subscriber(self, draft_id: str, taps: Taps, ring: Ring | None) -> Subscriber:
        """Return a subscriber in place of an older one of this draft id, whose stream ends."""
        if former := self._subscribers.pop(draft_id, None):
            former.close()
        ask_replay = partial(self._engine.call, self._engine.replay_all, draft_id)
        subscriber = Subscriber(asyncio.get_running_loop(), ask_replay, ring)
        self._subscribers[draft_id] = subscriber
        carrier = "inline bytes" if ring is None else "memory of the GPU" if ring.offer.gpu_handle else "shared memory"
        log.info(
            "a draft follows",
            draft_id=draft_id,
            tapped_layers=taps.layers,
            sink=taps.sink,
            window=taps.window,
            carrier=carrier,
        )
        return subscriber


async def _subscription(messages: AsyncIterator[pb.DraftMessage]) -> pb.Subscription:
    """Return the subscription that a draft's stream begins with. Raises InvalidRequest."""
    try:
        async with asyncio.timeout(_SUBSCRIPTION_SECONDS):
            first = await anext(_readable(messages), pb.DraftMessage())
    except TimeoutError:
        raise InvalidRequest(f"no subscription came within {_SUBSCRIPTION_SECONDS:g} s of the call") from None
    if not first.HasField("subscription"):
        raise InvalidRequest("a draft's first message is its subscription")
    return first.subscription


async def _readable(messages: AsyncIterator[pb.DraftMessage]) -> AsyncIterator[pb.DraftMessage]:
    """Yield a stream's messages. Raises InvalidRequest if bytes cannot be read as a message."""
    try:
        async for message in messages:
            yield message
    except Exception as error:
        raise InvalidRequest(f"a draft's message cannot be read: {error!r}") from error
