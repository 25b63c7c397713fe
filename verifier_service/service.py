"""The verifier's gRPC surface: translate, one call of the engine, translate back. Runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError

from spire.drafting import MAX_SPECULATION_DEPTH, ProposeAnswer, ProposeTask
from spire.errors import InvalidRequest, OutOfCapacity, SpireError
from spire.model.config import MAGICDEC
from spire.rpc.carrier import OverwritingRingReader, Ring
from spire.rpc.channel import GATEWAY_METADATA_KEY, HOST_METADATA_KEY, PROTOCOL_VERSION, STREAM_METADATA_KEY
from spire.rpc.cuda_ipc import gpu_of
from spire.rpc.drafting import DraftServicer
from spire.rpc.errors import call_status, item_status
from spire.rpc.host import host_id
from spire.rpc.limits import MAX_FOLLOWERS, check_named
from spire.rpc.line import Line, offer_line
from spire.v1 import draft_pb2
from spire.v1 import verifier_pb2 as pb
from spire.v1 import verifier_pb2_grpc as rpc
from verifier_service.activations import Taps
from verifier_service.compiling import Compiler, Compiling
from verifier_service.config import VerifierConfig
from verifier_service.drafting import Drafting
from verifier_service.engine import Engine
from verifier_service.grammar import Grammars, Matcher
from verifier_service.leases import Leases
from verifier_service.names import Names, told
from verifier_service.subscriber import Subscriber
from verifier_service.tasks import CallTask, StartTask, VerifyTask

log = structlog.get_logger("verifier_service")

# The ring holds a whole replay, or three rounds of an 8B target at 64 sequences; that of q four rounds of 64 sequences
# at k = 8 and a vocabulary of 4,096. A container has 64 MiB for both if not told more.
MAX_RING_BYTES, Q_RING_BYTES = 44 * 1024 * 1024, 18 * 1024 * 1024
# Between two looks at the pace that gateways are told.
_PACE_SECONDS = 1.0
# A ring in a GPU's memory outlives its subscription by this.
_STILL_MAPPED_SECONDS = 10.0


@dataclass(frozen=True)
class Hosted:
    """What this verifier serves. Without `grammars` it refuses them."""

    info: pb.GetInfoResponse
    tokenizer: pb.GetTokenizerResponse
    grammars: Grammars | None


Made = TypeVar("Made", Ring, OverwritingRingReader)


class RoundsStream:
    """One gateway's stream: requests go to the engine, answers come back as they are ready.

    On one host what is to be verified, and what became of it, passes by a line instead, with no event loop between.
    """

    def __init__(self, engine: Engine, gateway: str, compiler: Compiler | None):
        self._engine, self._gateway = engine, gateway
        self._compiling = Compiling(compiler, gateway, self._compiled, self._refuse) if compiler else None
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[pb.RoundsResponse | SpireError | None] = asyncio.Queue()
        self._outstanding = 0
        self._closing = False
        self._ended = False
        self._line: Line | None = None
        self._hung_up = False

    def end(self, error: SpireError) -> None:
        """Take nothing more, whatever still arrives, and fail the call."""
        self._ended = True
        self._answers.put_nowait(error)

    async def answers(self, requests: AsyncIterator[pb.RoundsRequest]) -> AsyncIterator[pb.RoundsResponse]:
        """Until the gateway has closed its side and everything it asked for is answered."""
        reader, teller = asyncio.create_task(self._read(requests)), asyncio.create_task(self._tell_pace())
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, SpireError):
                    raise answer
                yield answer
        finally:
            reader.cancel()
            teller.cancel()
            if self._compiling:
                self._compiling.end()

    async def _read(self, requests: AsyncIterator[pb.RoundsRequest]) -> None:
        try:
            await self._take_all(requests)
        except InvalidRequest as error:
            self._answers.put_nowait(error)
        except Exception as error:  # bytes that are no request, above all
            self._answers.put_nowait(InvalidRequest(f"a request cannot be read: {error!r}"))

    async def _take_all(self, requests: AsyncIterator[pb.RoundsRequest]) -> None:
        async for request in requests:
            if self._ended:
                return
            match request.WhichOneof("body"):
                case "start":
                    self._start(request.start)
                case "verify":
                    check_named("a VerifyBatch", len(request.verify.items))
                    self._engine.submit(VerifyTask(request.verify, self._gateway, self._reply))
                case None:
                    self._answers.put_nowait(InvalidRequest("a RoundsRequest came without a body"))
                    continue
            self._outstanding += 1
        self._closing = True
        self._end_if_answered()

    async def _tell_pace(self) -> None:
        """How long to wait for answers, as long as that changes; not to a gateway that reads none."""
        told = None
        while True:
            pace = pb.Pace(step_seconds=self._engine.pace.step_seconds, prefilled=self._engine.prefilled)
            if pace != told and self._answers.empty():
                told = pace
                self._answers.put_nowait(pb.RoundsResponse(pace=pace))
            await asyncio.sleep(_PACE_SECONDS)

    def take_line(self, line: Line) -> None:
        """Have the engine read the line that the gateway has opened. Any thread may call."""
        self._line = line
        self._engine.read(line, partial(self._brought, line), lambda: None)
        if self._hung_up:
            line.close()

    def hang_up(self) -> None:
        """The stream is over, and so is its line."""
        self._hung_up = True
        if self._line:
            self._line.close()

    def _brought(self, line: Line, packet: bytes) -> VerifyTask | CallTask:
        """On the engine's thread: what a packet asks for. One that asks for nothing sound ends line and stream."""
        try:
            request = pb.RoundsRequest.FromString(packet)
            if not request.HasField("verify"):
                raise InvalidRequest("by a line come batches to verify, and nothing else")
            check_named("a VerifyBatch", len(request.verify.items))
        except (DecodeError, InvalidRequest) as error:
            self._send(InvalidRequest(f"a packet of the line cannot be taken: {error}"))
            return CallTask(line.close, Future())
        return VerifyTask(request.verify, self._gateway, partial(self._reply_by, line))

    def _reply_by(self, line: Line, response: pb.RoundsResponse) -> None:
        """Called by the engine's thread."""
        if not line.send(response.SerializeToString()):
            self._send(response)

    def _send(self, answer: pb.RoundsResponse | SpireError) -> None:
        """By the stream. Any thread may call."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answers.put_nowait, answer)

    def _start(self, start: pb.Start) -> None:
        if start.adjustments.HasField("grammar") and self._compiling:
            self._compiling.begin(start)
        else:
            self._engine.submit(StartTask(start, self._gateway, self._reply, self._send))

    def withdraw(self, gateway: str, sequence_ids: Sequence[str]) -> None:
        """A gateway has released these."""
        if self._compiling and gateway == self._gateway:
            self._compiling.withdraw(frozenset(sequence_ids))

    def _compiled(self, start: pb.Start, matcher: Matcher) -> None:
        self._engine.submit(StartTask(start, self._gateway, self._reply, self._send, matcher))

    def _refuse(self, start: pb.Start, error: SpireError) -> None:
        log.debug("refused", sequence=start.sequence_id, code=type(error).__name__)
        self._take(pb.RoundsResponse(started=pb.Started(sequence_id=start.sequence_id, status=item_status(error))))

    def _reply(self, response: pb.RoundsResponse) -> None:
        """Called by the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, response)

    def _take(self, response: pb.RoundsResponse) -> None:
        self._answers.put_nowait(response)
        self._outstanding -= 1
        self._end_if_answered()

    def _end_if_answered(self) -> None:
        if self._closing and self._outstanding <= 0:
            self._answers.put_nowait(None)


def self_drafting(engine: Engine, hosted: Hosted, config: VerifierConfig, gateways: Names) -> DraftServicer:
    """The draft service's protocol, answered by the target itself: it follows nobody and remembers nothing."""
    ours = draft_pb2.DraftGetInfoResponse(
        protocol_version=PROTOCOL_VERSION,
        draft_id=MAGICDEC,
        kind=MAGICDEC,
        model_name=hosted.info.model_name,
        target_fingerprint=hosted.info.target_fingerprint,
        tokenizer_hash=hosted.info.tokenizer_hash,
        vocab_size=hosted.info.vocab_size,
        max_speculation_depth=min(MAX_SPECULATION_DEPTH, hosted.info.max_speculation_depth),
        max_sequences=hosted.info.max_sequences,
        following=True,
        shape=hosted.info.shape,
        window=config.self_window,
        sink=config.self_sink,
    )

    async def propose(task: ProposeTask) -> ProposeAnswer:
        engine.submit(task)
        return await asyncio.wrap_future(task.done)

    def asker(context: grpc.aio.ServicerContext) -> str:
        gateways.check(name := told(context, GATEWAY_METADATA_KEY), context)
        return name

    return DraftServicer(lambda: ours, propose, hosted.info.vocab_size, engine.steps.device, asker=asker)


class VerifierService(rpc.VerifierServicer):
    """Serves `spire.v1.Verifier`. State lives in the engine."""

    def __init__(self, engine: Engine, hosted: Hosted, config: VerifierConfig, drafting: Drafting):
        self._engine, self._hosted, self._shared_memory = engine, hosted, config.shared_memory
        self._drafting = drafting
        self.leases = Leases(engine, config.lease_seconds)
        self._subscribers: dict[str, Subscriber] = {}
        # Subscriptions by draft: a newer one may begin before the older has ended.
        self._following: Counter[str] = Counter()
        self._compiler = Compiler(hosted.grammars) if hosted.grammars else None
        self._streams: set[RoundsStream] = set()

    async def GetInfo(self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetInfoResponse:
        return self._hosted.info

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTokenizerResponse:
        return self._hosted.tokenizer

    async def Rounds(
        self, requests: AsyncIterator[pb.RoundsRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RoundsResponse]:
        gateway = told(context, GATEWAY_METADATA_KEY) or uuid.uuid4().hex
        number = told(context, STREAM_METADATA_KEY)
        stream = RoundsStream(self._engine, gateway, self._compiler)
        self._streams.add(stream)
        line = None
        try:
            with self.leases.held(gateway, context, int(number) if number.isdecimal() else 0, stream.end):
                line = offer_line(self._shared_memory) if _is_near(told(context, HOST_METADATA_KEY)) else None
                # The gateway learns from this that its stream stands, before it has asked for anything.
                await context.send_initial_metadata(())
                if line:
                    line.when_opened(stream.take_line)
                    yield pb.RoundsResponse(line=line.offer)
                async for response in stream.answers(requests):
                    yield response
        except SpireError as error:
            await context.abort(call_status(error), str(error))
        finally:
            if line:
                line.close()
            stream.hang_up()
            self._streams.discard(stream)

    async def Activations(
        self, request: pb.ActivationsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ActivationsResponse]:
        try:
            taps = Taps.read(request, self._hosted.info)
            self._check_room_for(request.draft_id)
            with self._drafting.names.held(request.draft_id, context), self._counted(request.draft_id):
                async with contextlib.aclosing(self._followed(request, taps, context)) as messages:
                    async for message in messages:
                        yield message
        except SpireError as error:
            await context.abort(call_status(error), str(error))

    def _check_room_for(self, draft_id: str) -> None:
        if draft_id not in self._following and len(self._following) >= MAX_FOLLOWERS:
            raise OutOfCapacity(f"{MAX_FOLLOWERS} drafts follow this verifier already: that is the most it takes")

    @contextlib.contextmanager
    def _counted(self, draft_id: str) -> Iterator[None]:
        self._following += Counter([draft_id])
        try:
            yield
        finally:
            self._following -= Counter([draft_id])

    async def _followed(
        self, request: pb.ActivationsRequest, taps: Taps, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.ActivationsResponse]:
        near = _is_near(request.host)
        ring, q_ring = await asyncio.to_thread(self._share, taps, request.gpu) if near else (None, None)
        subscriber, subscribed = self._subscribe(request.draft_id, taps, ring)
        line = offer_line(self._shared_memory) if near else None
        if line:
            line.when_opened(partial(self._drafting.take_line, request.draft_id, subscriber))
        if q_ring:
            self._engine.q_rings[request.draft_id] = q_ring
        try:
            # Sequences that start once the draft has seen this are followed. The draft forgets everything when it
            # arrives: what comes then begins with a replay.
            await asyncio.wrap_future(subscribed)
            await context.send_initial_metadata(())
            if request.host:
                yield pb.ActivationsResponse(
                    ring=ring.offer if ring else pb.Ring(),
                    q_ring=q_ring.offer if q_ring else pb.Ring(),
                    line=line.offer if line else pb.Ring(),
                )
            async for message in subscriber.messages():
                yield message
        finally:
            self._unsubscribe(request.draft_id, subscriber)
            if line:
                line.close()
            if subscriber.line:
                subscriber.line.close()
            if self._engine.q_rings.get(request.draft_id) is q_ring:
                self._engine.q_rings.pop(request.draft_id, None)
            if ring and ring.offer.gpu_handle:
                # It must not be given back while the draft has it, which learns of this end soon.
                asyncio.get_running_loop().call_later(_STILL_MAPPED_SECONDS, _keep, ring)

    def _share(self, taps: Taps, gpu: str) -> tuple[Ring | None, OverwritingRingReader | None]:
        """Memory for a draft on this host: for rows, if it is sent any, and for q. Allocated off the event loop."""
        size, device = min(MAX_RING_BYTES, self._engine.publisher.replay_bytes(taps)), self._engine.steps.device
        ring = None
        if size and gpu and gpu == gpu_of(device):
            ring = self._made(partial(Ring, gpu=device), size)
        if size and ring is None:
            ring = self._made(Ring, size)
        return ring, self._made(OverwritingRingReader, Q_RING_BYTES)

    def _made(self, kind: Callable[[Path, int], Made], size: int) -> Made | None:
        try:
            return kind(Path(self._shared_memory), size) if self._shared_memory else None
        except OSError as error:
            log.warning("no shared memory for a draft", directory=self._shared_memory, bytes=size, error=str(error))
            return None

    def _subscribe(self, draft_id: str, taps: Taps, ring: Ring | None) -> tuple[Subscriber, Future[None]]:
        """One stream per draft: a newer one ends the older. Returns also what is done once the draft is followed."""
        if former := self._subscribers.pop(draft_id, None):
            former.close()
        subscriber = Subscriber(
            asyncio.get_running_loop(),
            lambda deliver: self._engine.call(self._engine.replay_all, draft_id, deliver),
            ring,
        )
        self._subscribers[draft_id] = subscriber
        subscribed = self._engine.call(self._engine.subscribe, draft_id, taps, subscriber.deliver)
        log.info(
            "a draft follows",
            draft_id=draft_id,
            tapped_layers=taps.layers,
            sink=taps.sink,
            window=taps.window,
            carrier=_carrier(ring),
        )
        return subscriber, subscribed

    def _unsubscribe(self, draft_id: str, subscriber: Subscriber) -> None:
        if self._subscribers.get(draft_id) is subscriber:
            del self._subscribers[draft_id]
        self._engine.call(self._engine.publisher.unsubscribe, draft_id, subscriber.deliver)

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


def _keep(ring: Ring) -> None:
    """Until now."""


def _carrier(ring: Ring | None) -> str:
    if ring is None:
        return "inline bytes"
    return "memory of the GPU" if ring.offer.gpu_handle else "shared memory"


def _is_near(host: str) -> bool:
    """Whether a peer that names this host can see what is made in memory here."""
    return bool(host) and host == host_id()
