"""Following the verifier: one server stream brings the activations of all sequences of this draft.

On one host it brings places in a ring of shared memory instead of bytes, and on one GPU in a ring of that GPU's memory,
if that can be opened here, and offers another ring for q, and a line by which the smaller messages come sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import structlog
import torch

from draft_service.drafter import Span, Verified
from draft_service.orders import Orders
from draft_service.worker import Worker
from spire.errors import InvalidRequest, MismatchError, OutOfCapacity
from spire.model.config import DraftConfig
from spire.rpc.carrier import OverwritingRing, RingReader
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.cuda_ipc import gpu_of
from spire.rpc.host import host_id
from spire.rpc.line import Line, open_line
from spire.rpc.tensors import from_wire
from spire.v1 import draft_pb2
from spire.v1 import verifier_pb2 as pb
from spire.v1 import verifier_pb2_grpc as rpc

_RETRY_SECONDS = 0.2
# How long proposals may wait for activations in vain before the stream counts as stuck, or as long as eight of the
# verifier's steps: a flipped bit can make a message so long that it never ends, while pings are answered.
_STARVED_SECONDS = 3.0

# Another draft has this one's name, or the secret has changed.
_TURNED_AWAY = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}

INLINE, SHARED_MEMORY, CUDA_IPC = "inline", "shared_memory", "cuda_ipc"

_CPU = torch.device("cpu")

log = structlog.get_logger()


class Follower:
    """Subscribes, absorbs, and subscribes again when the verifier was lost. Every subscription begins with a replay."""

    def __init__(
        self,
        stub: rpc.VerifierStub,
        request: pb.ActivationsRequest,
        worker: Worker,
        shared_memory: str,
        orders: Orders | None = None,
        device: torch.device = _CPU,
    ):
        self._stub, self._request, self._worker, self._orders = stub, request, worker, orders
        self._shared_memory = Path(shared_memory)
        self._device, host = device, host_id() if shared_memory else ""
        # By which rows may come, the best first: the host and the GPU that a subscription names for it.
        gpu = gpu_of(device) if host else ""
        self._ways = list(dict.fromkeys([(host, gpu), (host, ""), ("", "")]))
        # One thread, however often a subscription breaks while the verifier's memory is being opened.
        self._opening = ThreadPoolExecutor(1, "opening")
        self._ring: RingReader | None = None
        # By which the verifier that is followed now says what is small and due at once.
        self.line: Line | None = None
        # Where the verifier that is followed now reads q from.
        self.q_ring: OverwritingRing | None = None
        self.following = False
        self.bytes_received = {INLINE: 0, SHARED_MEMORY: 0, CUDA_IPC: 0}
        self.subscriptions = 0

    async def run(self) -> None:
        """Never returns. Raises MismatchError when the verifier hosts another target now."""
        way = 0
        while True:
            self._request.host, self._request.gpu = self._ways[way]
            # Only the subscription that follows a failure does without: the verifier after that may be another.
            tried, way = way, 0
            call = self._stub.Activations(self._request)
            try:
                await self._subscribed(call)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise MismatchError(error.details()) from error
                if self.following or error.code() in _TURNED_AWAY:
                    log.warning("the verifier's activations stopped", code=error.code().name, reason=error.details())
            except (OutOfCapacity, TimeoutError) as error:
                log.warning("too far behind the verifier: beginning anew", reason=str(error))
                self._worker.forget_all()
            except (OSError, InvalidRequest) as error:
                way = min(tried + 1, len(self._ways) - 1)
                log.warning("activations cannot be taken up: asking for them otherwise", error=str(error))
            finally:
                self.following, self._ring, self.q_ring = False, None, None
                self._hang_up()
                call.cancel()
            await asyncio.sleep(_RETRY_SECONDS)
            while self._worker.behind:  # noqa: ASYNC110 - a replay now would only be dropped again
                await asyncio.sleep(_RETRY_SECONDS)

    async def _subscribed(self, call: grpc.aio.UnaryStreamCall) -> None:
        await call.initial_metadata()
        self._worker.forget_all()
        self.following, self.subscriptions = True, self.subscriptions + 1
        if not self._request.host:
            self._say_how()
        taking, starving = asyncio.create_task(self._take_all(call)), asyncio.create_task(self._starved())
        try:
            done, _ = await asyncio.wait({taking, starving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            taking.cancel()
            starving.cancel()

    async def _starved(self) -> None:
        """Raises TimeoutError when nothing has come for too long that proposals wait for."""
        while not self._worker.starves(_STARVED_SECONDS):  # noqa: ASYNC110 - plain data
            await asyncio.sleep(_STARVED_SECONDS / 10)
        raise TimeoutError("no activations came while proposals waited for them, for longer than the verifier's steps")

    async def _take_all(self, call: grpc.aio.UnaryStreamCall) -> None:
        async for message in call:
            if message is None:  # gRPC's way to say that the bytes were no such message
                raise InvalidRequest("the verifier sent what cannot be read")
            if message.HasField("ring"):
                await self._open(message)
            if message.ended:
                self._worker.end(list(message.ended))
            if message.spans:
                self._worker.absorb(*self._taken(message))

    async def _open(self, offers: pb.ActivationsResponse) -> None:
        """Map the verifier's memory, if it offers any. Not on the event loop: it is touched page by page."""
        loop = asyncio.get_running_loop()
        self._ring, self.q_ring = await loop.run_in_executor(self._opening, self._opened, offers)
        if self._orders and offers.line.name:
            self._dial(offers.line, self._orders)
        self._say_how()

    def _opened(self, offers: pb.ActivationsResponse) -> tuple[RingReader | None, OverwritingRing | None]:
        return (
            self._opened_ring(offers.ring) if offers.ring.name else None,
            OverwritingRing(self._shared_memory, offers.q_ring) if offers.q_ring.name else None,
        )

    def _opened_ring(self, offer: pb.Ring) -> RingReader:
        return RingReader(self._shared_memory, offer, self._device if offer.gpu_handle else None)

    def _dial(self, offer: pb.Ring, orders: Orders) -> None:
        try:
            self.line = open_line(self._shared_memory, offer)
        except OSError as error:
            log.warning("no line to the verifier: all goes by gRPC", error=str(error))
        else:
            self._worker.read(self.line, partial(self._hear, self.line, orders))

    def _hang_up(self) -> None:
        if self.line:
            self.line.close()
        self.line = None

    def _hear(self, line: Line, orders: Orders, packet: bytes) -> None:
        """On the model's thread."""
        if line is not self.line:
            return  # of an earlier subscription
        told = draft_pb2.Told.FromString(packet)
        if told.HasField("activations"):
            self._worker.absorb_now(*self._taken(told.activations))
        elif told.HasField("order"):
            orders.take(told.order, line)

    def _say_how(self) -> None:
        carrier = self._carrier if self._ring else INLINE
        log.info("following the verifier's activations", subscription=self.subscriptions, carrier=carrier)

    @property
    def _carrier(self) -> str:
        """By which what lies in a ring comes."""
        return CUDA_IPC if self._ring and self._ring.on_gpu else SHARED_MEMORY

    def _taken(self, message: pb.ActivationsResponse) -> tuple[Verified, Callable[[], None]]:
        """What a message says, and what to do once it is absorbed. Raises InvalidRequest."""
        spans = [Span(s.sequence_id, s.start, s.count, s.reset) for s in message.spans]
        rows = self._ring.rows(message) if self._ring else from_wire(message.rows)
        shape, tokens = list(message.rows.shape), list(message.tokens)
        count = sum([span.count for span in spans])
        if len(shape) != 3 or shape[0] != count or len(tokens) != (count if self._request.tokens else 0):
            raise InvalidRequest(f"activations of shape {shape} and {len(tokens)} tokens do not fit {count} positions")
        if message.slice.length:
            self.bytes_received[self._carrier] += message.slice.length
        else:
            self.bytes_received[INLINE] += len(message.rows.data)
        return Verified(spans, rows, tokens), self._release(message.slice)

    def _release(self, taken: pb.RingSlice) -> Callable[[], None]:
        ring = self._ring
        return (lambda: ring.release(taken)) if ring else (lambda: None)

    async def resync(self, sequence_ids: list[str]) -> None:
        """Ask for a replay. A verifier that cannot be reached will replay when it is back."""
        request = pb.ResyncRequest(draft_id=self._request.draft_id, sequence_ids=sequence_ids)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.Resync(request, timeout=5)


def subscription(draft_id: str, draft: DraftConfig) -> pb.ActivationsRequest:
    """What a draft of this configuration needs of the verifier."""
    return pb.ActivationsRequest(
        draft_id=draft_id,
        target_fingerprint=draft.target_fingerprint,
        protocol_version=PROTOCOL_VERSION,
        tapped_layers=draft.tapped_layers,
        sink=draft.sink,
        window=draft.window,
        tokens=not draft.tapped_layers,
    )
