"""The drafts' side of the gRPC surface: orders go out as the engine places them, guesses go to it.

On one host both pass by a line instead, from one model's thread to the other's with no event loop between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial

import grpc

from spire.errors import InvalidRequest, SpireError
from spire.rpc.channel import DRAFT_METADATA_KEY
from spire.rpc.errors import call_status
from spire.rpc.line import Line
from spire.v1 import draft_pb2 as pb
from spire.v1 import draft_pb2_grpc as rpc
from verifier_service.engine import Engine
from verifier_service.names import Names, told
from verifier_service.subscriber import Subscriber
from verifier_service.tasks import GuessTask


class OrdersStream:
    """One draft's stream, and its line where there is one."""

    def __init__(self, engine: Engine, draft_id: str):
        self._engine, self._draft_id = engine, draft_id
        self._loop = asyncio.get_running_loop()
        self._orders: asyncio.Queue[pb.ProposeBatch | InvalidRequest | None] = asyncio.Queue()

    def send(self, order: pb.ProposeBatch) -> None:
        """Called by the engine's thread, which may go on to change the message."""
        line = self._engine.lines.get(self._draft_id)
        told = pb.Told()
        told.order.CopyFrom(order)
        if line and line.send(told.SerializeToString()):
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._orders.put_nowait, told.order)

    async def orders(self, guesses: AsyncIterator[pb.ProposeBatchResult]) -> AsyncIterator[pb.ProposeBatch]:
        """Until the draft has closed its side. Raises InvalidRequest when it sends what is no message."""
        reader = asyncio.create_task(self._read(guesses))
        try:
            while (order := await self._orders.get()) is not None:
                if isinstance(order, InvalidRequest):
                    raise order
                yield order
        finally:
            reader.cancel()

    async def _read(self, guesses: AsyncIterator[pb.ProposeBatchResult]) -> None:
        try:
            async for guessed in guesses:
                self._engine.submit(GuessTask(self._draft_id, partial(_as_it_came, guessed)))
            self._orders.put_nowait(None)
        except Exception as error:  # bytes that are no message, above all
            self._orders.put_nowait(InvalidRequest(f"guesses cannot be read: {error!r}"))


def _as_it_came(guessed: pb.ProposeBatchResult) -> pb.ProposeBatchResult:
    return guessed


class Drafting(rpc.DraftingServicer):
    """Serves `spire.v1.Drafting`, and the lines of drafts on this host."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.names = Names("draft")

    async def Orders(
        self, guesses: AsyncIterator[pb.ProposeBatchResult], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProposeBatch]:
        draft_id = told(context, DRAFT_METADATA_KEY)
        try:
            with self.names.held(draft_id, context), self._asked(draft_id) as stream:
                await asyncio.wrap_future(self._engine.call(self._engine.orders.connect, draft_id, stream.send))
                # The draft learns from this that it will be asked.
                await context.send_initial_metadata(())
                async for order in stream.orders(guesses):
                    yield order
        except SpireError as error:
            await context.abort(call_status(error), str(error))

    @contextlib.contextmanager
    def _asked(self, draft_id: str) -> Iterator[OrdersStream]:
        stream = OrdersStream(self._engine, draft_id)
        try:
            yield stream
        finally:
            self._engine.call(self._engine.orders.disconnect, draft_id, stream.send)

    def take_line(self, draft_id: str, subscriber: Subscriber, line: Line) -> None:
        """Have the engine read the line that a draft has opened."""
        subscriber.line = self._engine.lines[draft_id] = line

        def guessed(packet: bytes) -> GuessTask:
            return GuessTask(draft_id, partial(pb.ProposeBatchResult.FromString, packet))

        def ended() -> None:
            subscriber.line = None
            if self._engine.lines.get(draft_id) is line:
                del self._engine.lines[draft_id]

        self._engine.read(line, guessed, ended)
