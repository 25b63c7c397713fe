"""The connections to the two model services: a handshake, then one long-lived stream, reopened whenever it breaks.

A peer is `up` from a good handshake until its stream breaks, ends or is reset. Whoever waits for an answer then gets
PeerLost. A peer that answers too late is reset too: a stuck stream cannot be told from a slow one. It is left alone for
a while, twice as long each time, and forgiven by answers that come in time.

One that says of itself that it does not serve, because it drains or its model is stuck, keeps its stream and is no more
`usable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.errors import PeerLost
from gateway.shortcut import Shortcut
from gateway.tokenizer import TextCodec
from spire.chat_template import ChatTemplate
from spire.errors import MismatchError, SpireError
from spire.model.config import MAGICDEC
from spire.pace import limit
from spire.rpc.channel import (
    GATEWAY_METADATA_KEY,
    HOST_METADATA_KEY,
    PROTOCOL_VERSION,
    STREAM_METADATA_KEY,
    connect,
)
from spire.rpc.host import host_id
from spire.rpc.tls import in_words
from spire.rpc.trust import ANYBODY, Trust
from spire.v1 import draft_pb2, verifier_pb2
from spire.v1.draft_pb2_grpc import DraftStub
from spire.v1.verifier_pb2_grpc import VerifierStub

_CONTROL_DEADLINE = 5.0
_HEALTH_SECONDS = 1.0
# Between tries to reach a peer that is not there: nobody waits for them.
_SHORTEST_RETRY, _LONGEST_RETRY = 0.2, 1.0

log = structlog.get_logger("gateway")

Answer = TypeVar("Answer", verifier_pb2.VerifyBatchResult, draft_pb2.ProposeBatchResult)


class Circuit:
    """How long to leave alone a peer whose lateness costs a round each time: closed at 0 seconds."""

    SHORTEST, LONGEST = 0.2, 10.0
    # With one late answer in 23 it stays as long as it is.
    FORGIVING = 0.97

    def __init__(self) -> None:
        self.seconds = 0.0

    def late(self) -> None:
        self.seconds = min(max(self.SHORTEST, 2 * self.seconds), self.LONGEST)

    def in_time(self) -> None:
        self.seconds = self.seconds * self.FORGIVING if self.seconds > self.SHORTEST else 0.0


@dataclass(frozen=True, slots=True)
class Asked(Generic[Answer]):
    """A batch that was sent: where its answer comes with the time of it, when it was sent, how long to wait."""

    answer: asyncio.Future[tuple[Answer, float]]
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Model:
    """What the verifier serves, as its handshake told it."""

    info: verifier_pb2.GetInfoResponse
    codec: TextCodec
    chat_template: ChatTemplate
    seen_at: int

    @property
    def name(self) -> str:
        return self.info.model_name


class Peer(ABC, Generic[Answer]):
    """One model service: its address, its stream, the answers that are waited for.

    A client may read what it raises, so the address is in the log alone.
    """

    name: str

    def __init__(self, address: str, trust: Trust):
        self.address = address
        self.up = False
        self.serving = False
        # Of the monotonic clock; while it is not usable.
        self.unusable_since = time.monotonic()
        self.circuit = Circuit()
        self._channel, self._trust = connect(address, trust), trust
        self._call: grpc.aio.StreamStreamCall | None = None
        # gRPC breaks a stream that two write to at once: lanes do.
        self._writing = asyncio.Lock()
        # Each answer with the time at which it was read from the stream.
        self._answers: dict[int, asyncio.Future[tuple[Answer, float]]] = {}
        self._batch_ids = count(1)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._retry = _SHORTEST_RETRY
        self._late = False
        self._hurry = asyncio.Event()
        self._complaint = ""

    @property
    def usable(self) -> bool:
        """Whether new work may be given to it."""
        return self.up and self.serving

    async def maintain(self) -> None:
        """Handshake, follow the stream until it breaks, try again; for ever."""
        while True:
            try:
                await self._must_serve()
                await self.handshake()
                await self._follow()
            except (grpc.aio.AioRpcError, SpireError) as error:
                self._complain(error)
            except Exception:  # whatever it sent, it must be met again
                log.exception("connection failed", peer=self.name, address=self.address)
            await self._pause()

    async def close(self) -> None:
        self.reset()
        await self._channel.close()

    def reset(self) -> None:
        """Drop the stream: `maintain` opens another one."""
        self._is(up=False)
        if self._call is not None:
            self._call.cancel()

    def hurry(self) -> None:
        """There is a reason to believe that the next try succeeds: make it soon."""
        self._retry = _SHORTEST_RETRY
        self._hurry.set()

    async def _pause(self) -> None:
        pause = self.circuit.seconds if self._late else self._retry
        self._late = False
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._hurry.wait()
        self._retry = min(self._retry * 2, _LONGEST_RETRY)

    def _is(self, up: bool, serving: bool = True) -> None:
        if self.usable and not (up and serving):
            self.unusable_since = time.monotonic()
        self.up, self.serving = up, serving

    async def _serves(self) -> bool:
        """What it says of itself. Raises AioRpcError when nobody answers."""
        answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=_CONTROL_DEADLINE)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _must_serve(self) -> None:
        if not await self._serves():
            raise PeerLost(f"the {self.name} is there and does not serve: it drains or is stuck")

    async def _watch(self) -> None:
        """While the stream stands: a model that is stuck is told by nothing else, pings are answered all the same."""
        while self.up:
            await asyncio.sleep(_HEALTH_SECONDS)
            try:
                serving = await self._serves()
            except grpc.aio.AioRpcError as error:
                self._complain(error)
                self.reset()
                return
            if serving != self.serving:
                log.warning("serving" if serving else "not serving", peer=self.name, address=self.address)
            self._is(self.up, serving)

    @abstractmethod
    async def handshake(self) -> None:
        """Ask who is there. Raises AioRpcError when nobody answers, MismatchError when it is the wrong one."""

    @abstractmethod
    def _open(self) -> grpc.aio.StreamStreamCall: ...

    @abstractmethod
    def _receive(self, message: Any) -> None: ...

    def _lost(self) -> None:
        """The stream is gone."""

    async def _follow(self) -> None:
        call = self._call = self._open()
        self._is(up=True)
        log.info("connected", peer=self.name, address=self.address)
        self._complaint, self._retry = "", _SHORTEST_RETRY
        watch = asyncio.create_task(self._watch())
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message is None:  # gRPC's way to say that the bytes were no such message
                    raise PeerLost(f"the {self.name} sent what cannot be read")
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
                    future.set_exception(PeerLost(f"the stream to the {self.name} broke"))
            self._lost()

    async def _write(self, message: Any) -> None:
        call = self._call
        if call is None or not self.up:
            raise PeerLost(f"the {self.name} is not connected")
        try:
            async with self._writing:
                await call.write(message)
        except asyncio.CancelledError:
            if _cancelled():
                raise
            raise PeerLost(f"the stream to the {self.name} was reset") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._complain(error)
            self.reset()
            raise PeerLost(f"the stream to the {self.name} broke") from error

    async def _send(self, batch_id: int, message: Any, seconds: float) -> Asked[Answer]:
        """Send a batch, to be answered within `seconds`, or longer where the model is slow. Raises PeerLost."""
        loop = asyncio.get_running_loop()
        asked: Asked[Answer] = Asked(loop.create_future(), loop.time(), seconds)
        self._answers[batch_id] = asked.answer
        asked.answer.add_done_callback(lambda answer: self._forget(batch_id, answer))
        if self._sent_by_line(batch_id, message):
            return asked
        try:
            async with self._in_time(asked):
                await self._write(message)
        except BaseException:
            asked.answer.cancel()
            raise
        return asked

    def limit(self, seconds: float) -> float:
        """How long to wait for an answer: `seconds`, or longer where the model is known to be slow."""
        return seconds

    def _sent_by_line(self, batch_id: int, message: Any) -> bool:
        """Whether there was a shorter way."""
        return False

    async def _answer(self, asked: Asked[Answer]) -> tuple[Answer, float]:
        """The answer and the seconds from sending to reading it. Raises PeerLost."""
        loop = asyncio.get_running_loop()
        try:
            # Meanwhile it may tell that it takes longer.
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

    @contextlib.asynccontextmanager
    async def _in_time(self, asked: Asked[Answer]) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(asked.at + self.limit(asked.seconds)):
                yield
        except TimeoutError:
            raise self._too_late(asked.seconds) from None

    def _forget(self, batch_id: int, answer: asyncio.Future[tuple[Answer, float]]) -> None:
        del self._answers[batch_id]
        if not answer.cancelled():
            answer.exception()  # seen: a stream that broke under the write has failed the answer too

    def _too_late(self, seconds: float) -> PeerTooLate:
        self.circuit.late()
        self._late = True
        self.reset()
        return PeerTooLate(f"the {self.name} did not answer within {self.limit(seconds):g} s")

    def _answered(self, answer: Answer) -> None:
        future = self._answers.get(answer.batch_id)
        if future is not None and not future.done():
            future.set_result((answer, asyncio.get_running_loop().time()))

    def _complain(self, error: Exception) -> None:
        reason = in_words(error.details(), self._trust.tls) if isinstance(error, grpc.aio.AioRpcError) else error
        if (complaint := f"{reason}") != self._complaint:
            self._complaint = complaint
            log.warning("unreachable", peer=self.name, address=self.address, reason=complaint)


class PeerTooLate(PeerLost):
    pass


class VerifierPeer(Peer[verifier_pb2.VerifyBatchResult]):
    name = "verifier"

    def __init__(
        self,
        address: str,
        gateway_id: str,
        on_started: Callable[[verifier_pb2.Started], None],
        on_standing: Callable[[verifier_pb2.Standing], None],
        on_lost: Callable[[], None],
        on_connected: Callable[[Model | None, Model], None],
        on_prefilled: Callable[[], None] = lambda: None,
        trust: Trust = ANYBODY,
        shared_memory: str = "",
    ):
        super().__init__(address, trust)
        self.model: Model | None = None
        self._shared_memory = shared_memory
        self._shortcut = Shortcut(shared_memory, self._receive, self.reset)
        # Share of its cache that live sequences have, as it said last.
        self.cache_usage = 0.0
        # What it told last of how long its steps take.
        self.pace = verifier_pb2.Pace()
        self._gateway_id = gateway_id
        self._on_started, self._on_standing = on_started, on_standing
        self._on_lost, self._on_connected = on_lost, on_connected
        self._on_prefilled = on_prefilled
        self._stub = VerifierStub(self._channel)
        self._streams = count()

    @property
    def own_name(self) -> tuple[str, str]:
        """What the metadata of a call say that is about this gateway's sequences."""
        return GATEWAY_METADATA_KEY, self._gateway_id

    async def handshake(self) -> None:
        info = await self._stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=_CONTROL_DEADLINE)
        _same("protocol version", "this gateway", PROTOCOL_VERSION, "the verifier", info.protocol_version)
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
        self.model = Model(info, codec, chat_template, seen_at)
        self._on_connected(before, self.model)

    async def start(self, message: verifier_pb2.Start, deadline: float) -> None:
        """Send Start; Started comes through the callback. Raises PeerLost."""
        try:
            async with asyncio.timeout(self.limit(deadline)):
                await self._write(verifier_pb2.RoundsRequest(start=message))
        except TimeoutError:
            raise self._too_late(deadline) from None

    def limit(self, seconds: float) -> float:
        return limit(self.pace.step_seconds, seconds)

    @property
    def load_seconds(self) -> float:
        """What the verifier that was met last took to load; 0 before there was one."""
        return self.model.info.load_seconds if self.model else 0.0

    @property
    def seconds_until_back(self) -> float:
        """Seconds that its successor is still expected to load, 0 for one that is here."""
        return 0.0 if self.usable else max(0.0, self.unusable_since + self.load_seconds - time.monotonic())

    def patience(self, seconds: float) -> float:
        """How long to wait for its successor: `seconds`, and twice what it took to load."""
        return seconds + 2 * self.load_seconds

    async def ask(self, request: verifier_pb2.RoundsRequest, seconds: float) -> Asked[verifier_pb2.VerifyBatchResult]:
        """Send a request whose `verify` has its items, and wait for nothing. Raises PeerLost."""
        request.verify.batch_id = next(self._batch_ids)
        return await self._send(request.verify.batch_id, request, seconds)

    async def answer(
        self, asked: Asked[verifier_pb2.VerifyBatchResult]
    ) -> tuple[verifier_pb2.VerifyBatchResult, float]:
        """The answer and the seconds it took. Raises PeerLost."""
        return await self._answer(asked)

    async def release(self, sequence_ids: list[str], seconds: float) -> None:
        """Free what these hold, within so many seconds. Raises AioRpcError."""
        request = verifier_pb2.ReleaseRequest(sequence_ids=sequence_ids)
        answer = await self._stub.Release(request, timeout=self.limit(seconds), metadata=[self.own_name])
        self.cache_usage = answer.cache_usage

    def _open(self) -> grpc.aio.StreamStreamCall:
        metadata = [self.own_name, (STREAM_METADATA_KEY, str(next(self._streams)))]
        if self._shared_memory:
            metadata.append((HOST_METADATA_KEY, host_id()))
        return self._stub.Rounds(metadata=metadata)

    def _sent_by_line(self, batch_id: int, message: verifier_pb2.RoundsRequest) -> bool:
        return self.up and self._shortcut.send(batch_id, message)

    def _forget(self, batch_id: int, answer: asyncio.Future[tuple[verifier_pb2.VerifyBatchResult, float]]) -> None:
        self._shortcut.forget(batch_id)
        super()._forget(batch_id, answer)

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
        elif message.HasField("line"):
            self._shortcut.open(message.line)

    def _lost(self) -> None:
        self._shortcut.close()
        self._on_lost()


class DraftPeer(Peer[draft_pb2.ProposeBatchResult]):
    name = "draft"

    def __init__(self, address: str, verifier: VerifierPeer, deadline: float, trust: Trust = ANYBODY):
        super().__init__(address, trust)
        self.info: draft_pb2.DraftGetInfoResponse | None = None
        self._deadline = deadline
        self._verifier = verifier
        self._stub = DraftStub(self._channel)

    async def handshake(self) -> None:
        """Raises MismatchError for a draft of another target, PeerLost for one that does not follow it yet."""
        # Who takes longer than this to say who it is never proposes in time: trying costs no round.
        info = await self._stub.GetInfo(draft_pb2.DraftGetInfoRequest(), timeout=self._deadline)
        model = self._verifier.model
        if model is None:
            raise PeerLost("the verifier has not told yet which target this draft must belong to")
        draft, target = f"the draft at {self.address}", f"the target at {self._verifier.address}"
        _same("protocol version", draft, info.protocol_version, "this gateway", PROTOCOL_VERSION)
        _same("target fingerprint", draft, info.target_fingerprint, target, model.info.target_fingerprint)
        if info.tokenizer_hash:
            _same("tokenizer", draft, info.tokenizer_hash, target, model.info.tokenizer_hash)
        _same("vocabulary size", draft, info.vocab_size, target, model.info.vocab_size)
        if not info.following:
            raise PeerLost(f"{draft} does not hear the verifier's activations yet")
        self.info = info

    @property
    def in_verifier(self) -> bool:
        """Whether the verifier drafts: then a guess takes its turn among its other work, as a verification does."""
        return self.info is not None and self.info.kind == MAGICDEC

    def limit(self, seconds: float) -> float:
        return self._verifier.limit(seconds) if self.in_verifier else seconds

    def missed(self, late: bool) -> None:
        """It did not guess what the verifier asked of it: leave it alone for a while."""
        if late:
            self._too_late(self._deadline)
        else:
            self.reset()

    async def propose(
        self, items: list[draft_pb2.ProposeItem], deadline: float
    ) -> tuple[draft_pb2.ProposeBatchResult, float]:
        batch = draft_pb2.ProposeBatch(batch_id=next(self._batch_ids), items=items)
        return await self._answer(await self._send(batch.batch_id, batch, deadline))

    def _open(self) -> grpc.aio.StreamStreamCall:
        return self._stub.Rounds(metadata=[self._verifier.own_name])

    def _receive(self, message: draft_pb2.ProposeBatchResult) -> None:
        self._answered(message)


def _cancelled() -> bool:
    """Whether this task itself is being cancelled; a cancelled call raises the same error in whoever uses it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _same(what: str, first: str, first_value: object, second: str, second_value: object) -> None:
    if first_value != second_value:
        raise MismatchError(f"{what} differs: {first} has {first_value!r}, {second} has {second_value!r}")
