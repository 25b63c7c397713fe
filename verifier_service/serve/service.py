"""The verifier's gRPC service: translate a call, call the engine, translate back. Runs on the event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import structlog

from spire.errors import InvalidRequest, SpireError
from spire.rpc.channel import GATEWAY_METADATA_KEY, STREAM_METADATA_KEY
from spire.rpc.errors import call_status, item_status
from spire.rpc.limits import check_named
from spire.v1 import verifier_pb2 as pb, verifier_pb2_grpc as rpc
from verifier_service.config import VerifierConfig
from verifier_service.engine.batch import VerifyTask
from verifier_service.engine.drafts import Drafts
from verifier_service.engine.engine import VerifierEngine
from verifier_service.engine.sequence import StartTask
from verifier_service.metrics import GRPC
from verifier_service.sampling.compiling import Compiling
from verifier_service.sampling.grammar import Grammars, Matcher
from verifier_service.serve.embeddings import embedding_messages
from verifier_service.serve.names import Leases, told

log = structlog.get_logger("verifier_service")

# Seconds between two checks of the pace, which is sent to gateways if it has changed.
_PACE_SECONDS = 1.0
# Placeholder in a stream's queue for the newest message about drafts.
_DRAFTS = pb.RoundsResponse()


@dataclass(frozen=True)
class Hosted:
    """The served model. If `grammars` is None, Starts with a grammar are refused."""

    info: pb.GetInfoResponse
    tokenizer: pb.GetTokenizerResponse
    grammars: Grammars | None


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

    def __init__(self, engine: VerifierEngine, hosted: Hosted, config: VerifierConfig, drafts: Drafts):
        self._engine, self._hosted, self._model, self._drafts = engine, hosted, config.model, drafts
        self.leases = Leases(engine, config.lease_seconds)
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
