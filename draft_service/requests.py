"""The stream of draft requests from the verifier; the draft opens this stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import grpc
import structlog

from draft_service.replies import Replies
from draft_service.worker import DraftResult, Worker
from spire.errors import InvalidRequest
from spire.lost_device import end_if_device_lost
from spire.rpc.channel import DRAFT_METADATA_KEY
from spire.v1 import draft_pb2 as pb, draft_pb2_grpc as rpc

_RETRY_SECONDS = 0.2

log = structlog.get_logger("draft_service")


class Requests:
    """Receives draft requests and sends the replies. Runs on the event loop."""

    def __init__(self, stub: rpc.DraftingStub, draft_id: str, worker: Worker):
        self._stub, self._draft_id, self._worker, self.replies = stub, draft_id, worker, Replies(worker.drafter)
        # True while the stream is open.
        self.connected = False

    async def run(self) -> None:
        """Handle draft requests in an endless loop. Connects again whenever the stream breaks."""
        while True:
            call = self._stub.Requests(metadata=((DRAFT_METADATA_KEY, self._draft_id),))
            # One queue per stream: a reply must not reach another verifier.
            replies: asyncio.Queue[pb.DraftReply] = asyncio.Queue()
            replying = asyncio.create_task(_write(call, replies))
            try:
                await call.initial_metadata()
                self.connected = True
                while (request := await call.read()) is not grpc.aio.EOF:
                    if request is None:  # gRPC could not parse the bytes
                        raise InvalidRequest("the verifier sent what cannot be read")
                    self.take(request, replies)
            except (grpc.aio.AioRpcError, InvalidRequest) as error:
                if self.connected:
                    log.warning("the verifier's requests stopped", error=type(error).__name__)
            finally:
                self.connected = False
                replying.cancel()
                call.cancel()
            await asyncio.sleep(_RETRY_SECONDS)

    def take(self, request: pb.DraftRequest, replies: asyncio.Queue[pb.DraftReply]) -> None:
        """Pass a request to the model thread, which parses it, drafts and puts the reply into `replies`."""
        loop = asyncio.get_running_loop()

        def reply(message: pb.DraftReply) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(replies.put_nowait, message)

        self._worker.do(lambda: self._begin(request, reply))

    def _begin(self, request: pb.DraftRequest, reply: Callable[[pb.DraftReply], None]) -> None:
        """Parse a request and queue its task, on the model thread. The verifier gets a reply even after an error."""
        self._worker.verifier_step_seconds = request.step_seconds
        nothing = pb.DraftReply(batch_id=request.batch_id)

        def drafted(done: Future[DraftResult]) -> None:
            message = nothing
            try:
                message = self.replies.to(parsed, None if done.exception() else done.result())
            except Exception as error:
                end_if_device_lost(error)
                log.exception("a reply could not be made")
            reply(message)

        try:
            parsed = self.replies.parsed(request)
            if parsed.task is None:
                reply(self.replies.to(parsed, None))
                return
        except Exception as error:
            end_if_device_lost(error)
            log.exception("a request could not be read")
            reply(nothing)
            return
        parsed.task.done.add_done_callback(drafted)
        self._worker.draft(parsed.task)


async def _write(call: grpc.aio.StreamStreamCall, replies: asyncio.Queue[pb.DraftReply]) -> None:
    while True:
        await call.write(await replies.get())
