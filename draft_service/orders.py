"""What the verifier asks of this draft: by a stream that the draft opens, and by the line where there is one."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import grpc
import structlog

from draft_service.worker import Worker
from spire.drafting import ProposeAnswer
from spire.errors import InvalidRequest
from spire.rpc.channel import DRAFT_METADATA_KEY
from spire.rpc.drafting import DraftServicer
from spire.rpc.line import Line
from spire.v1 import draft_pb2 as pb
from spire.v1 import draft_pb2_grpc as rpc

_RETRY_SECONDS = 0.2

log = structlog.get_logger("draft_service")


class Orders:
    """Lives on the event loop; only `take` is called by the model's thread."""

    def __init__(self, stub: rpc.DraftingStub, draft_id: str, drafting: DraftServicer, worker: Worker):
        self._stub, self._draft_id, self._drafting, self._worker = stub, draft_id, drafting, worker
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[pb.ProposeBatchResult] = asyncio.Queue()
        # Whether the verifier asks.
        self.connected = False
        # Answers that went by the stream.
        self.answered = 0

    async def run(self) -> None:
        """Never returns: connects again whenever the stream breaks."""
        while True:
            call = self._stub.Orders(metadata=((DRAFT_METADATA_KEY, self._draft_id),))
            answering = asyncio.create_task(self._answer(call))
            try:
                await call.initial_metadata()
                self.connected = True
                while (order := await call.read()) is not grpc.aio.EOF:
                    if order is None:  # gRPC's way to say that the bytes were no such message
                        raise InvalidRequest("the verifier sent what cannot be read")
                    self._worker.verifier_step_seconds = order.step_seconds
                    self._answers.put_nowait(await self._drafting.answer(order))
            except (grpc.aio.AioRpcError, InvalidRequest) as error:
                if self.connected:
                    log.warning("the verifier's orders stopped", error=type(error).__name__)
            finally:
                self.connected = False
                answering.cancel()
                call.cancel()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _answer(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await call.write(await self._answers.get())
            self.answered += 1

    def take(self, order: pb.ProposeBatch, line: Line) -> None:
        """Draft for an order that came by the line, once the activations it needs are there, and answer by the line."""
        self._worker.verifier_step_seconds = order.step_seconds
        asked = self._drafting.asked(order, of_verifier=True)

        def reply(answer: ProposeAnswer | None) -> None:
            answered = self._drafting.answered(asked, answer, together=True)
            if not line.send(answered.SerializeToString()):
                self._loop.call_soon_threadsafe(self._answers.put_nowait, answered)

        def drafted(done: Future[ProposeAnswer]) -> None:
            reply(None if done.exception() else done.result())

        if asked.task is None:
            reply(None)
        else:
            asked.task.done.add_done_callback(drafted)
            self._worker.await_activations(asked.task)
