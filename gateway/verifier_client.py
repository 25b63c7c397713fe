"""The gRPC client of the verifier: a handshake, then one long-lived stream, reopened whenever the stream breaks.

The verifier is `up` from a successful handshake until the stream breaks, ends or is reset; pending answers then raise
PeerLost. A late answer resets the stream too, because a stuck stream looks like a slow one. After a late answer,
the client waits before it reconnects: twice as long each time, and less after answers in time.

While the health check reports that the verifier does not serve (it drains, or its model is stuck), the stream stays
open but the verifier is not `usable`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.circuit import Circuit
from gateway.errors import PeerLost
from gateway.text.tokenizer import TextCodec
from spire.errors import MismatchError, SpireError
from spire.rpc.channel import GATEWAY_METADATA_KEY, PROTOCOL_VERSION, STREAM_METADATA_KEY, connect
from spire.rpc.tls import in_words
from spire.rpc.trust import ANYBODY, Trust
from spire.service.pace import limit
from spire.text.chat_template import ChatTemplate
from spire.v1 import verifier_pb2
from spire.v1.verifier_pb2_grpc import VerifierStub

_CONTROL_DEADLINE = 5.0
_HEALTH_SECONDS = 1.0
# Seconds between attempts to connect to an unreachable verifier: no request waits for an attempt.
_SHORTEST_RETRY, _LONGEST_RETRY = 0.2, 1.0

log = structlog.get_logger("gateway")


class SentBatch(NamedTuple):
    """A batch sent to the verifier: the future of (answer, time of arrival), the time of sending, and the timeout."""

    answer: asyncio.Future[tuple[verifier_pb2.VerifyBatchResult, float]]
    at: float
    seconds: float


class ServedModel(NamedTuple):
    """The model that the verifier serves, with its tokenizer and chat template, as received at the handshake."""

    info: verifier_pb2.GetInfoResponse
    codec: TextCodec
    chat_template: ChatTemplate
    seen_at: int

    @property
    def name(self) -> str:
        return self.info.model_name


class VerifierClient:
    """The gRPC client of the verifier: keeps the stream open, sends messages, and matches answers to sent batches.

    HTTP clients may see messages of errors raised here, so the verifier's address is only in the log.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        on_started: Callable[[verifier_pb2.Started], None],
        on_standing: Callable[[verifier_pb2.Standing], None],
        on_lost: Callable[[], None],
        on_connected: Callable[[ServedModel | None, ServedModel], None],
        on_prefilled: Callable[[], None] = lambda: None,
        on_drafts: Callable[[Iterable[verifier_pb2.DraftInfo]], None] = lambda _: None,
        trust: Trust = ANYBODY,
    ):
        self.address = address
        self.up = False
        self.serving = False
        # Monotonic time; valid while the verifier is not usable.
        self.unusable_since = time.monotonic()
        self.circuit = Circuit()
        self.model: ServedModel | None = None
        # Share of the verifier's KV cache that live sequences occupy, as last reported.
        self.cache_usage = 0.0
        # The duration of the verifier's steps, as last reported.
        self.pace = verifier_pb2.Pace()
        # gRPC metadata that names this gateway in calls about its sequences.
        self._name = GATEWAY_METADATA_KEY, gateway_id
        self._on_started, self._on_standing = on_started, on_standing
        self._on_lost, self._on_connected = on_lost, on_connected
        self._on_prefilled, self._on_drafts = on_prefilled, on_drafts
        self._channel, self._trust = connect(address, trust), trust
        self._stub = VerifierStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._streams = count()
        self._call: grpc.aio.StreamStreamCall | None = None
        # gRPC breaks a stream that two tasks write to at once.
        self._writing = asyncio.Lock()
        # Pending answers by batch id, each with the time at which it was read from the stream.
        self._answers: dict[int, asyncio.Future[tuple[verifier_pb2.VerifyBatchResult, float]]] = {}
        self._batch_ids = count(1)
        self._retry = _SHORTEST_RETRY
        self._late = False
        self._complaint = ""

    @property
    def usable(self) -> bool:
        """True if the stream to the verifier is open and the verifier reports that it serves."""
        return self.up and self.serving

    async def maintain(self) -> None:
        """Keep the verifier connected, for ever: handshake, read the stream until it breaks, wait, repeat."""
        while True:
            try:
                if not await self._serves():
                    raise PeerLost("the verifier is there and does not serve: it drains or is stuck")
                await self.handshake()
                await self._follow()
            except (grpc.aio.AioRpcError, SpireError) as error:
                self._complain(error)
            except Exception:  # whatever the verifier sent, the client must connect again
                log.exception("connection failed", peer="verifier", address=self.address)
            pause, self._late = self.circuit.seconds if self._late else self._retry, False
            await asyncio.sleep(pause)
            self._retry = min(self._retry * 2, _LONGEST_RETRY)

    async def close(self) -> None:
        self.reset()
        await self._channel.close()

    def reset(self) -> None:
        """Cancel the stream to the verifier; `maintain` opens a new one."""
        self._is(up=False)
        if self._call is not None:
            self._call.cancel()

    def _is(self, up: bool, serving: bool = True) -> None:
        if self.usable and not (up and serving):
            self.unusable_since = time.monotonic()
        self.up, self.serving = up, serving

    async def _serves(self) -> bool:
        """Return True if the verifier's health check reports SERVING. Raises AioRpcError if the call fails."""
        answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=_CONTROL_DEADLINE)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _watch(self) -> None:
        """Poll the verifier's health while the stream is open: a verifier with a stuck model still answers pings."""
        while self.up:
            await asyncio.sleep(_HEALTH_SECONDS)
            try:
                serving = await self._serves()
            except grpc.aio.AioRpcError as error:
                self._complain(error)
                self.reset()
                return
            if serving != self.serving:
                log.warning("serving" if serving else "not serving", peer="verifier", address=self.address)
            self._is(self.up, serving)

    async def _follow(self) -> None:
        metadata = [self._name, (STREAM_METADATA_KEY, str(next(self._streams)))]
        call = self._call = self._stub.Rounds(metadata=metadata)
        self._is(up=True)
        log.info("connected", peer="verifier", address=self.address)
        self._complaint, self._retry = "", _SHORTEST_RETRY
        watch = asyncio.create_task(self._watch())
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message is None:  # gRPC could not parse the bytes
                    raise PeerLost("the verifier sent what cannot be read")
                self._receive(message)
        except asyncio.CancelledError:
            if _cancelled():
                raise
        finally:
            self._is(up=False)
            watch.cancel()
            call.cancel()
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(PeerLost("the stream to the verifier broke"))
            self._on_lost()

    async def _write(self, message: verifier_pb2.RoundsRequest, seconds: float) -> None:
        """Write a message to the stream. Timeout: `seconds`, or eight verifier steps if longer. Raises PeerLost."""
        call = self._call
        if call is None or not self.up:
            raise PeerLost("the verifier is not connected")
        try:
            async with asyncio.timeout(self.limit(seconds)), self._writing:
                await call.write(message)
        except TimeoutError:
            raise self._too_late(seconds) from None
        except asyncio.CancelledError:
            if _cancelled():
                raise
            raise PeerLost("the stream to the verifier was reset") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._complain(error)
            self.reset()
            raise PeerLost("the stream to the verifier broke") from error

    async def ask(self, request: verifier_pb2.RoundsRequest, seconds: float) -> SentBatch:
        """Send a batch (`request.verify`) to the verifier without waiting for the answer. Raises PeerLost.

        The write and the answer each have a timeout of `seconds`, or of eight verifier steps if longer.
        """
        request.verify.batch_id = batch_id = next(self._batch_ids)
        loop = asyncio.get_running_loop()
        asked = SentBatch(loop.create_future(), loop.time(), seconds)
        self._answers[batch_id] = asked.answer
        asked.answer.add_done_callback(lambda answer: self._forget(batch_id, answer))
        try:
            await self._write(request, seconds)
        except BaseException:
            asked.answer.cancel()
            raise
        return asked

    async def answer(self, asked: SentBatch) -> tuple[verifier_pb2.VerifyBatchResult, float]:
        """Return a batch's answer, and the seconds from sending the batch to reading the answer. Raises PeerLost."""
        loop = asyncio.get_running_loop()
        try:
            # The timeout may grow during the wait, when the verifier reports slower steps.
            while not asked.answer.done() and (left := asked.at + self.limit(asked.seconds) - loop.time()) > 0:
                await asyncio.wait([asked.answer], timeout=left)
        except asyncio.CancelledError:
            asked.answer.cancel()
            raise
        if not asked.answer.done():
            asked.answer.cancel()
            raise self._too_late(asked.seconds)
        answer, read_at = asked.answer.result()
        self.circuit.in_time()
        return answer, read_at - asked.at

    def _forget(self, batch_id: int, answer: asyncio.Future[tuple[verifier_pb2.VerifyBatchResult, float]]) -> None:
        del self._answers[batch_id]
        if not answer.cancelled():
            answer.exception()  # marks it as retrieved: a stream that breaks during a write fails the answer too

    def _too_late(self, seconds: float) -> PeerLost:
        self.circuit.late()
        self._late = True
        self.reset()
        return PeerLost(f"the verifier did not answer within {self.limit(seconds):g} s")

    def _answered(self, answer: verifier_pb2.VerifyBatchResult) -> None:
        future = self._answers.get(answer.batch_id)
        if future is not None and not future.done():
            future.set_result((answer, asyncio.get_running_loop().time()))

    def _complain(self, error: Exception) -> None:
        reason = in_words(error.details(), self._trust.tls) if isinstance(error, grpc.aio.AioRpcError) else error
        if (complaint := f"{reason}") != self._complaint:
            self._complaint = complaint
            log.warning("unreachable", peer="verifier", address=self.address, reason=complaint)

    async def handshake(self) -> None:
        info = await self._stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=_CONTROL_DEADLINE)
        if (theirs := info.protocol_version) != PROTOCOL_VERSION:
            raise MismatchError(
                f"protocol version differs: this gateway has {PROTOCOL_VERSION!r}, the verifier has {theirs!r}"
            )
        before = self.model
        if before is None or before.info.epoch != info.epoch:
            answer = await self._stub.GetTokenizer(verifier_pb2.GetTokenizerRequest(), timeout=_CONTROL_DEADLINE)
            codec = TextCodec(answer.tokenizer_json)
            chat_template = ChatTemplate(answer.chat_template, dict(answer.special_tokens))
            self.cache_usage = 0.0
        else:
            codec, chat_template = before.codec, before.chat_template
        same = before is not None and before.info.target_fingerprint == info.target_fingerprint
        seen_at = before.seen_at if before is not None and same else int(time.time())
        self.model = ServedModel(info, codec, chat_template, seen_at)
        self._on_connected(before, self.model)

    async def start(self, message: verifier_pb2.Start, deadline: float) -> None:
        """Send a Start message; the callback `on_started` receives the verifier's reply, a Started. Raises PeerLost."""
        await self._write(verifier_pb2.RoundsRequest(start=message), deadline)

    def limit(self, seconds: float) -> float:
        return limit(self.pace.step_seconds, seconds)

    @property
    def load_seconds(self) -> float:
        """The seconds that the last connected verifier took to load its model; 0 before the first handshake."""
        return self.model.info.load_seconds if self.model else 0.0

    @property
    def seconds_until_back(self) -> float:
        """The expected seconds until a restarted verifier has loaded its model; 0 while the verifier is usable."""
        return 0.0 if self.usable else max(0.0, self.unusable_since + self.load_seconds - time.monotonic())

    async def release(self, sequence_ids: list[str], seconds: float) -> None:
        """Release ended sequences. Timeout: `seconds`, or eight verifier steps if longer. Raises AioRpcError."""
        request = verifier_pb2.ReleaseRequest(sequence_ids=sequence_ids)
        answer = await self._stub.Release(request, timeout=self.limit(seconds), metadata=[self._name])
        self.cache_usage = answer.cache_usage

    def _receive(self, message: verifier_pb2.RoundsResponse) -> None:
        if message.HasField("verified"):
            self.cache_usage = message.verified.cache_usage
            self._answered(message.verified)
        elif message.HasField("started"):
            self._on_started(message.started)
        elif message.HasField("pace"):
            if message.pace.prefilled != self.pace.prefilled:
                self._on_prefilled()
            self.pace = message.pace
        elif message.HasField("standing"):
            self._on_standing(message.standing)
        elif message.HasField("drafts"):
            self._on_drafts(message.drafts.drafts)


def _cancelled() -> bool:
    """Return True if the current task itself is cancelled: a cancelled gRPC call raises CancelledError as well."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
