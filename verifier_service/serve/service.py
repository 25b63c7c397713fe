"""The verifier's gRPC service: translate a call, call the engine, translate back. Runs on the event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import structlog
import torch

from spire.errors import InvalidRequest, OutOfCapacity, SpireError
from spire.rpc.carrier import OverwritingRingReader, Ring
from spire.rpc.channel import GATEWAY_METADATA_KEY, STREAM_METADATA_KEY
from spire.rpc.cuda_ipc import gpu_of
from spire.rpc.errors import call_status, item_status
from spire.rpc.host import host_id
from spire.rpc.limits import MAX_FOLLOWERS, check_named
from spire.v1 import verifier_pb2 as pb, verifier_pb2_grpc as rpc
from verifier_service.config import VerifierConfig
from verifier_service.engine.batch import VerifyTask
from verifier_service.engine.drafts import Drafts, check_draft_id
from verifier_service.engine.engine import VerifierEngine
from verifier_service.engine.sequence import StartTask
from verifier_service.feed.feed import Taps
from verifier_service.feed.subscriber import Subscriber
from verifier_service.metrics import GRPC
from verifier_service.sampling.compiling import Compiling
from verifier_service.sampling.grammar import Grammars, Matcher
from verifier_service.serve.draft_connections import DraftConnections
from verifier_service.serve.embeddings import embedding_messages
from verifier_service.serve.names import Leases, told

log = structlog.get_logger("verifier_service")

# The ring of activations holds a whole replay, or three rounds of an 8B target at 64 sequences; the ring of q holds
# four rounds of 64 sequences at k = 8 and a vocabulary of 4,096. A container has 64 MiB for both by default.
MAX_RING_BYTES, Q_RING_BYTES = 44 * 1024 * 1024, 18 * 1024 * 1024
# In a GPU's memory: four rounds of 64 sequences at k = 16 and 4,096 ids of a larger vocabulary.
GPU_Q_RING_BYTES = 128 * 1024 * 1024
# Seconds between two checks of the pace, which is sent to gateways if it has changed.
_PACE_SECONDS = 1.0
# Placeholder in a stream's queue for the newest message about drafts.
_DRAFTS = pb.RoundsResponse()
# Seconds that a ring in a GPU's memory outlives its subscription.
_STILL_MAPPED_SECONDS = 10.0


@dataclass(frozen=True)
class Hosted:
    """The served model. If `grammars` is None, Starts with a grammar are refused."""

    info: pb.GetInfoResponse
    tokenizer: pb.GetTokenizerResponse
    grammars: Grammars | None


Made = TypeVar("Made", Ring, OverwritingRingReader)


class RoundsStream:
    """One gateway's stream: requests go to the engine, and answers are sent as they become ready."""

    def __init__(self, engine: VerifierEngine, gateway: str, grammars: Grammars | None):
        self._engine, self._gateway = engine, gateway
        self._compiling = Compiling(grammars, gateway, self._start, self._refuse) if grammars else None
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[pb.RoundsResponse | SpireError | None] = asyncio.Queue()
        self._outstanding = 0
        self._closing = False
        self._ended = False
        # The newest message about drafts while its placeholder waits in the queue.
        self._drafts: pb.RoundsResponse | None = None

    def end(self, error: SpireError) -> None:
        """Ignore further requests and fail the call with `error`."""
        self._ended = True
        self._answers.put_nowait(error)

    async def answers(self, requests: AsyncIterator[pb.RoundsRequest]) -> AsyncIterator[pb.RoundsResponse]:
        """Yield answers until the gateway has closed its side of the stream and every request is answered.

        Raises SpireError for a message that breaks the protocol.
        """
        reader, teller = asyncio.create_task(self._read(requests)), asyncio.create_task(self._tell_pace())
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, SpireError):
                    raise answer
                if answer is _DRAFTS:
                    answer, self._drafts = self._drafts or answer, None
                yield answer
        finally:
            reader.cancel()
            teller.cancel()
            if self._compiling:
                self._compiling.end()

    async def _read(self, requests: AsyncIterator[pb.RoundsRequest]) -> None:
        try:
            async for request in requests:
                if self._ended:
                    return
                match request.WhichOneof("body"):
                    case "start":
                        self._start(request.start)
                    case "verify":
                        check_named("a VerifyBatch", len(request.verify.items))
                        self._engine.metrics.rounds.labels(GRPC).inc()
                        self._engine.submit(VerifyTask(request.verify, self._gateway, self._reply))
                    case None:
                        raise InvalidRequest("a RoundsRequest came without a body")
                self._outstanding += 1
            self._closing = True
            self._end_if_answered()
        except InvalidRequest as error:
            self._answers.put_nowait(error)
        except Exception as error:  # mostly bytes that are not a request
            self._answers.put_nowait(InvalidRequest(f"a request cannot be read: {error!r}"))

    async def _tell_pace(self) -> None:
        """Send the gateway step time and prefill progress whenever they change, unless answers wait in the queue."""
        told = None
        while True:
            pace = pb.Pace(step_seconds=self._engine.pace.step_seconds, prefilled=self._engine.prefilled)
            if pace != told and (told is None or self._answers.empty()):
                told = pace
                self._answers.put_nowait(pb.RoundsResponse(pace=pace))
            await asyncio.sleep(_PACE_SECONDS)

    def tell_drafts(self, message: pb.RoundsResponse) -> None:
        """Queue a message about drafts for the gateway. Any thread may call this method."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._keep_newest, message)

    def _keep_newest(self, message: pb.RoundsResponse) -> None:
        """Queue a message about drafts; it replaces an older one that has not been sent yet."""
        if self._drafts is None:
            self._answers.put_nowait(_DRAFTS)
        self._drafts = message

    def send(self, answer: pb.RoundsResponse | SpireError) -> None:
        """Queue a message that does not count as the answer to a request. Any thread may call this method."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    def _start(self, start: pb.Start, matcher: Matcher | None = None) -> None:
        """Submit a Start to the engine; if it has a grammar, compile the grammar first."""
        if matcher is None and self._compiling and start.adjustments.HasField("grammar"):
            self._compiling.begin(start)
        else:
            self._engine.submit(StartTask(start, self._gateway, self._reply, self.send, matcher))

    def withdraw(self, gateway: str, sequence_ids: Sequence[str]) -> None:
        """Withdraw released sequences that still wait for their grammars, if this stream is of `gateway`."""
        if self._compiling and gateway == self._gateway:
            self._compiling.withdraw(frozenset(sequence_ids))

    def _refuse(self, start: pb.Start, error: SpireError) -> None:
        log.debug("refused", sequence=start.sequence_id, code=type(error).__name__)
        self._take(pb.RoundsResponse(started=pb.Started(sequence_id=start.sequence_id, status=item_status(error))))

    def _reply(self, response: pb.RoundsResponse) -> None:
        """Send the answer to a request. The engine's thread calls this."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, response)

    def _take(self, response: pb.RoundsResponse) -> None:
        self._answers.put_nowait(response)
        self._outstanding -= 1
        self._end_if_answered()

    def _end_if_answered(self) -> None:
        if self._closing and self._outstanding <= 0:
            self._answers.put_nowait(None)


class VerifierService(rpc.VerifierServicer):
    """Serves `spire.v1.Verifier`. The engine holds the state of sequences."""

    def __init__(
        self, engine: VerifierEngine, hosted: Hosted, config: VerifierConfig, drafting: DraftConnections, drafts: Drafts
    ):
        self._engine, self._hosted, self._shared_memory = engine, hosted, config.shared_memory
        self._model = config.model
        self._drafting, self._drafts = drafting, drafts
        self.leases = Leases(engine, config.lease_seconds)
        self._subscribers: dict[str, Subscriber] = {}
        # The number of subscriptions by draft id: a newer one may begin before the older one has ended.
        self._following: Counter[str] = Counter()
        self._streams: set[RoundsStream] = set()

    async def GetInfo(self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetInfoResponse:
        return self._hosted.info

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTokenizerResponse:
        return self._hosted.tokenizer

    async def GetEmbeddings(
        self, request: pb.GetEmbeddingsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GetEmbeddingsResponse]:
        try:
            parts = embedding_messages(self._model)
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                yield part
        except SpireError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Rounds(
        self, requests: AsyncIterator[pb.RoundsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RoundsResponse]:
        gateway = told(context, GATEWAY_METADATA_KEY) or uuid.uuid4().hex
        number = told(context, STREAM_METADATA_KEY)
        stream = RoundsStream(self._engine, gateway, self._hosted.grammars)
        self._streams.add(stream)
        try:
            with self.leases.held(gateway, context, int(number) if number.isdecimal() else 0, stream.end):
                # The metadata tell the gateway that its stream is open, before its first request.
                await context.send_initial_metadata(())
                with self._drafts.telling(stream.tell_drafts):
                    async for response in stream.answers(requests):
                        yield response
        except SpireError as error:
            await context.abort(call_status(error), str(error))
        finally:
            self._streams.discard(stream)

    async def Activations(
        self, request: pb.ActivationsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ActivationsResponse]:
        try:
            check_draft_id(request.draft_id)
            taps = Taps.read(request, self._hosted.info)
            if request.HasField("draft"):
                self._drafts.check(request.draft)
            with self._drafting.names.held(request.draft_id, context), self._counted(request.draft_id):
                async with self._followed(request, taps, context) as (subscriber, offer):
                    if offer:
                        yield offer
                    # Only drafts that take requests are announced to gateways.
                    asked = request.HasField("draft")
                    with self._drafts.followed_by(request.draft_id, request.draft) if asked else nullcontext():
                        async for message in subscriber.messages():
                            yield message
        except SpireError as error:
            await context.abort(call_status(error), str(error))

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
    async def _followed(
        self, request: pb.ActivationsRequest, taps: Taps, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tuple[Subscriber, pb.ActivationsResponse | None]]:
        """Subscribe a draft inside the `with` block. Yields the subscriber, and a ring offer if requested."""
        near = request.host and request.host == host_id()
        ring, q_ring = await asyncio.to_thread(self._share, taps, request.gpu) if near else (None, None)
        subscriber, subscribed = self._subscribe(request.draft_id, taps, ring)
        if q_ring:
            self._engine.q_rings[request.draft_id] = q_ring
        try:
            # Sequences that start after the draft has received the metadata are followed. The draft then forgets
            # everything: the messages that follow begin with a replay.
            await asyncio.wrap_future(subscribed)
            await context.send_initial_metadata(())
            offer = pb.ActivationsResponse(
                ring=ring.offer if ring else pb.Ring(), q_ring=q_ring.offer if q_ring else pb.Ring()
            )
            yield subscriber, offer if request.host else None
        finally:
            if self._subscribers.get(request.draft_id) is subscriber:
                del self._subscribers[request.draft_id]
            self._engine.call(self._engine.publisher.unsubscribe, request.draft_id, subscriber.deliver)
            if self._engine.q_rings.get(request.draft_id) is q_ring:
                self._engine.q_rings.pop(request.draft_id, None)
            # Memory of a GPU must not be freed while the draft maps it; the draft soon learns of the stream's end.
            mapped = [each.gpu_memory for each in (ring, q_ring) if each and each.gpu_memory is not None]
            asyncio.get_running_loop().call_later(_STILL_MAPPED_SECONDS, mapped.clear)

    def _share(self, taps: Taps, gpu: str) -> tuple[Ring | None, OverwritingRingReader | None]:
        """Create the rings for a draft on this host, for activations (if it taps layers) and q. Blocks the thread."""
        size, device = min(MAX_RING_BYTES, self._engine.publisher.replay_bytes(taps)), self._engine.steps.device
        ring = of_q = None
        if gpu and gpu == gpu_of(device):
            ring = self._made(Ring, size, device)
            of_q = self._made(OverwritingRingReader, GPU_Q_RING_BYTES, device)
        return ring or self._made(Ring, size), of_q or self._made(OverwritingRingReader, Q_RING_BYTES)

    def _made(self, kind: type[Made], size: int, gpu: torch.device | None = None) -> Made | None:
        try:
            return kind(Path(self._shared_memory), size, gpu) if self._shared_memory and size else None
        except OSError as error:
            log.warning("no shared memory for a draft", directory=self._shared_memory, bytes=size, error=str(error))
            return None

    def _subscribe(self, draft_id: str, taps: Taps, ring: Ring | None) -> tuple[Subscriber, Future[None]]:
        """Subscribe a draft and end its older stream. The future completes once the engine has the new subscriber."""
        if former := self._subscribers.pop(draft_id, None):
            former.close()
        ask_replay = partial(self._engine.call, self._engine.replay_all, draft_id)
        subscriber = Subscriber(asyncio.get_running_loop(), ask_replay, ring)
        self._subscribers[draft_id] = subscriber
        subscribed = self._engine.call(self._engine.subscribe, draft_id, taps, subscriber.deliver)
        carrier = "inline bytes" if ring is None else "memory of the GPU" if ring.offer.gpu_handle else "shared memory"
        log.info(
            "a draft follows",
            draft_id=draft_id,
            tapped_layers=taps.layers,
            sink=taps.sink,
            window=taps.window,
            carrier=carrier,
        )
        return subscriber, subscribed

    async def Resync(self, request: pb.ResyncRequest, context: grpc.aio.ServicerContext) -> pb.ResyncResponse:
        try:
            check_named("a ResyncRequest", len(request.sequence_ids))
            self._drafting.names.check(request.draft_id, context)
        except SpireError as error:
            await context.abort(call_status(error), str(error))
        done = self._engine.call(self._engine.replay, request.draft_id, list(request.sequence_ids))
        unknown = await asyncio.wrap_future(done)
        return pb.ResyncResponse(unknown=unknown)

    async def Release(self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.ReleaseResponse:
        gateway = told(context, GATEWAY_METADATA_KEY)
        try:
            check_named("a ReleaseRequest", len(request.sequence_ids))
            self.leases.names.check(gateway, context)
        except SpireError as error:
            await context.abort(call_status(error), str(error))
        for stream in self._streams:
            stream.withdraw(gateway, request.sequence_ids)
        done = self._engine.call(self._engine.slots.release_own, gateway, list(request.sequence_ids))
        released = await asyncio.wrap_future(done)
        return pb.ReleaseResponse(released=released, cache_usage=self._engine.steps.cache.usage)
