"""The gRPC service for drafts: sends the engine's draft requests, and passes draft replies to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from spire.errors import InvalidRequest, SpireError
from spire.rpc.channel import DRAFT_METADATA_KEY
from spire.rpc.errors import call_status
from spire.v1 import draft_pb2 as pb, draft_pb2_grpc as rpc
from verifier_service.engine.drafts import check_draft_id
from verifier_service.engine.engine import VerifierEngine
from verifier_service.metrics import GRPC
from verifier_service.serve.names import Names, told


class RequestStream:
    """One draft's stream of draft requests and replies."""

    def __init__(self, engine: VerifierEngine, draft_id: str):
        self._engine, self._draft_id = engine, draft_id
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[pb.DraftRequest | InvalidRequest | None] = asyncio.Queue()

    def send(self, request: pb.DraftRequest | None) -> None:
        """Send a copy of a request, or end the stream. The engine's thread calls this and may change the message
        afterwards."""
        if self._loop.is_closed():
            return
        if request is None:
            self._loop.call_soon_threadsafe(self._requests.put_nowait, None)
        else:
            self._engine.metrics.draft_requests.labels(GRPC).inc()
            message = pb.DraftRequest()
            message.CopyFrom(request)
            self._loop.call_soon_threadsafe(self._requests.put_nowait, message)

    async def requests(self, replies: AsyncIterator[pb.DraftReply]) -> AsyncIterator[pb.DraftRequest]:
        """Yield requests until the draft closes its side. Raises InvalidRequest if a reply cannot be read."""
        reader = asyncio.create_task(self._read(replies))
        try:
            while (request := await self._requests.get()) is not None:
                if isinstance(request, InvalidRequest):
                    raise request
                yield request
        finally:
            reader.cancel()

    async def _read(self, replies: AsyncIterator[pb.DraftReply]) -> None:
        try:
            async for reply in replies:
                self._engine.take_reply(self._draft_id, reply)
            self._requests.put_nowait(None)
        except Exception as error:  # mostly bytes that are not a message
            self._requests.put_nowait(InvalidRequest(f"replies cannot be read: {error!r}"))


class DraftConnections(rpc.DraftingServicer):
    """Serves `spire.v1.Drafting`."""

    def __init__(self, engine: VerifierEngine):
        self._engine = engine
        self.names = Names("draft")

    async def Requests(
        self, replies: AsyncIterator[pb.DraftReply], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DraftRequest]:
        draft_id = told(context, DRAFT_METADATA_KEY)
        try:
            check_draft_id(draft_id)
            with self.names.held(draft_id, context):
                stream, engine = RequestStream(self._engine, draft_id), self._engine
                try:
                    await asyncio.wrap_future(engine.call(engine.draft_requests.connect, draft_id, stream.send))
                    # The metadata tell the draft that requests will follow.
                    await context.send_initial_metadata(())
                    async for request in stream.requests(replies):
                        yield request
                finally:
                    engine.call(engine.draft_requests.disconnect, draft_id, stream.send)
        except SpireError as error:
            await context.abort(call_status(error), str(error))
