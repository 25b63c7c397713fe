"""The draft's one stream to the verifier: activations and draft requests arrive on it, replies leave on it.

Packets contain the activations, or if verifier and draft share a host, only their positions in a ring buffer in shared
memory (in GPU memory if verifier and draft share a GPU). A second ring, likewise, carries q to the verifier.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import structlog
import torch

from draft_service.drafter import Span, Verified
from draft_service.requests import Requests
from draft_service.worker import Worker
from spire.errors import InvalidRequest, MismatchError, OutOfCapacity
from spire.model.config import DraftConfig
from spire.rpc.carrier import CARRIERS, INLINE, OverwritingRing, RingReader
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.cuda_ipc import gpu_of
from spire.rpc.host import host_id
from spire.rpc.tensors import from_wire
from spire.v1 import draft_pb2 as pb, draft_pb2_grpc as rpc, verifier_pb2

_RETRY_SECONDS = 0.2
# A request that is unanswered for so long may be taken for lost, unless the verifier is told of it.
_WORKING_SECONDS = 3.0
# The stream is stuck if requests wait longer than this, and longer than eight of the verifier's steps, for activations:
# a flipped bit can make a message so long that it never ends, while pings are still answered.
_STARVED_SECONDS = 3.0

# The subscription is refused: another process uses this draft's id, the id is reserved, or the secret has changed.
_TURNED_AWAY = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT}

log = structlog.get_logger()


class Follower:
    """Follows the verifier, and again after errors. Every subscription begins with a replay."""

    def __init__(
        self,
        stub: rpc.DraftingStub,
        subscription: pb.Subscription,
        worker: Worker,
        requests: Requests,
        shared_memory: str,
        device: torch.device = torch.device("cpu"),
    ):
        self._stub, self._subscription, self._worker, self._requests = stub, subscription, worker, requests
        self._shared_memory = Path(shared_memory)
        self._device, host = device, host_id() if shared_memory else ""
        # The messages to send on the current stream; None ends it. One queue per stream: a reply must not reach another
        # verifier.
        self._messages: asyncio.Queue[pb.DraftMessage | None] = asyncio.Queue()
        # (host, GPU) to send with a subscription: they select the carrier. The fastest carrier comes first.
        gpu = gpu_of(device) if host else ""
        self._ways = list(dict.fromkeys([(host, gpu), (host, ""), ("", "")]))
        # A single thread, even if several subscriptions break while rings are being opened.
        self._opening = ThreadPoolExecutor(1, "opening")
        self._ring: RingReader | None = None
        # The ring from which the current verifier reads q.
        self.q_ring: OverwritingRing | None = None
        self.following = False
        self.bytes_received = dict.fromkeys(CARRIERS, 0)
        self.subscriptions = 0

    async def run(self) -> None:
        """Keep a subscription open, in an endless loop. Raises MismatchError if draft and verifier no longer match."""
        way = 0
        while True:
            self._subscription.host, self._subscription.gpu = self._ways[way]
            # Use a slower carrier for one subscription only: the next one may reach another verifier.
            tried, way = way, 0
            self._messages = asyncio.Queue()
            self._messages.put_nowait(pb.DraftMessage(subscription=self._subscription))
            call = self._stub.Follow(_sent(self._messages))
            try:
                await self._subscribed(call)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise MismatchError(error.details()) from error
                if self.following or error.code() in _TURNED_AWAY:
                    log.warning("the verifier's stream stopped", code=error.code().name, reason=error.details())
            except (OutOfCapacity, TimeoutError) as error:
                log.warning("too far behind the verifier: beginning anew", reason=str(error))
                self._worker.forget_all()
            except (OSError, InvalidRequest) as error:
                way = min(tried + 1, len(self._ways) - 1)
                log.warning("packets cannot be taken up: asking for them otherwise", error=str(error))
            finally:
                self.following, self._ring, self.q_ring = False, None, None
                self._messages.put_nowait(None)
                call.cancel()
            await asyncio.sleep(_RETRY_SECONDS)
            while self._worker.behind:  # noqa: ASYNC110 - a replay now would only be dropped again
                await asyncio.sleep(_RETRY_SECONDS)

    async def _subscribed(self, call: grpc.aio.StreamStreamCall) -> None:
        await call.initial_metadata()
        self._worker.forget_all()
        self.following, self.subscriptions = True, self.subscriptions + 1
        if not self._subscription.host:
            self._say_how()
        tasks = [asyncio.create_task(each) for each in (self._take_all(call), self._starved(), self._tell_of_work())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _tell_of_work(self) -> None:
        """Tell the verifier, every few seconds, of a request that the model thread has not answered yet."""
        while True:
            before = set(self._requests.unanswered)
            await asyncio.sleep(_WORKING_SECONDS)
            if before & self._requests.unanswered:
                self._messages.put_nowait(pb.DraftMessage(working=pb.Working()))

    async def _starved(self) -> None:
        """Raise TimeoutError once draft requests have waited too long and no activations have arrived."""
        while not self._worker.starves(_STARVED_SECONDS):  # noqa: ASYNC110 - plain data
            await asyncio.sleep(_STARVED_SECONDS / 10)
        raise TimeoutError("no activations came while requests waited for them, for longer than the verifier's steps")

    async def _take_all(self, call: grpc.aio.StreamStreamCall) -> None:
        reply = self._replier()
        async for packet in call:
            if packet is None:  # gRPC could not parse the bytes
                raise InvalidRequest("the verifier sent what cannot be read")
            if packet.HasField("ring"):
                await self._open(packet)
            if packet.ended:
                self._worker.end(list(packet.ended))
            if packet.spans:
                self._worker.absorb(*self._taken(packet))
            if packet.HasField("request"):
                self._requests.take(packet.request, reply)

    def _replier(self) -> Callable[[pb.DraftReply], None]:
        """Return a function that sends a reply on the current stream. Any thread may call the function."""
        loop, messages = asyncio.get_running_loop(), self._messages

        def reply(message: pb.DraftReply) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(messages.put_nowait, pb.DraftMessage(reply=message))

        return reply

    async def _open(self, offers: pb.DraftPacket) -> None:
        """Map the offered rings on another thread, because mapping touches every page."""
        loop = asyncio.get_running_loop()
        self._ring, self.q_ring = await loop.run_in_executor(self._opening, self._opened, offers)
        self._say_how()

    def _opened(self, offers: pb.DraftPacket) -> tuple[RingReader | None, OverwritingRing | None]:
        def gpu_of_ring(ring: verifier_pb2.Ring) -> torch.device | None:
            return self._device if ring.gpu_handle else None

        return (
            RingReader(self._shared_memory, offers.ring, gpu_of_ring(offers.ring)) if offers.ring.name else None,
            OverwritingRing(self._shared_memory, offers.q_ring, gpu_of_ring(offers.q_ring))
            if offers.q_ring.name
            else None,
        )

    def _say_how(self) -> None:
        log.info("following the verifier", subscription=self.subscriptions, carrier=self._carrier)

    @property
    def _carrier(self) -> str:
        """The carrier of activations: `INLINE` without a ring, else the kind of the ring's memory."""
        return self._ring.carrier if self._ring else INLINE

    def _taken(self, packet: pb.DraftPacket) -> tuple[Verified, Callable[[], None]]:
        """Parse a packet: return its activations and a function to free their ring slice. Raises InvalidRequest."""
        spans = [Span(s.sequence_id, s.start, s.count, s.reset) for s in packet.spans]
        rows = self._ring.rows(packet) if self._ring else from_wire(packet.rows)
        shape, tokens = list(packet.rows.shape), list(packet.tokens)
        count = sum([span.count for span in spans])
        if len(shape) != 3 or shape[0] != count or len(tokens) != (count if self._subscription.tokens else 0):
            raise InvalidRequest(f"activations of shape {shape} and {len(tokens)} tokens do not fit {count} positions")
        ring, taken = self._ring, packet.slice
        self.bytes_received[self._carrier if taken.length else INLINE] += taken.length or len(packet.rows.data)
        return Verified(spans, rows, tokens), (lambda: ring.release(taken)) if ring else (lambda: None)

    def resync(self, sequence_ids: list[str]) -> None:
        """Ask the verifier to replay these sequences. Without a stream nothing is asked: the next begins with a replay.

        Runs on the event loop.
        """
        self._messages.put_nowait(pb.DraftMessage(resync=pb.Resync(sequence_ids=sequence_ids)))


async def _sent(messages: asyncio.Queue[pb.DraftMessage | None]) -> AsyncIterator[pb.DraftMessage]:
    while (message := await messages.get()) is not None:
        yield message


def subscription(draft_id: str, draft: DraftConfig) -> pb.Subscription:
    """Return the subscription of a draft with this configuration."""
    return pb.Subscription(
        draft_id=draft_id,
        target_fingerprint=draft.target_fingerprint,
        protocol_version=PROTOCOL_VERSION,
        tapped_layers=draft.tapped_layers,
        sink=draft.sink,
        window=draft.window,
        tokens=not draft.tapped_layers,
    )
