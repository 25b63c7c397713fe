"""A verifier in memory: it speaks the protocol over a channel that is no network, and computes tokens by arithmetic.

The gateway's own peers, rounds and engine run before it unchanged; `tests/fake_clock.py` gives both their time. A step
takes `step_seconds`, verifies every batch that waits and reads `budget` positions of prompts, the oldest first. What
finds no room waits for it in order, as the protocol says; when memory runs out the youngest gives way.
What it does not know: drafts, grammars, logprobs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from spire.errors import OutOfCapacity, SpireError, UnknownSequence
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.errors import OK, item_status
from spire.v1 import verifier_pb2 as pb

VOCAB = 1000
# Tokens that there is room for before anybody gives way again.
LEAST_RUN = 16
CONTEXT = 20_000


def following(tokens: list[int]) -> int:
    """The token behind these: what is generated depends on every position, so no replay can be wrong unseen."""
    return 2 + (sum(tokens) * 31 + len(tokens) * 7) % (VOCAB - 2)


def continuation(prompt: list[int], length: int) -> list[int]:
    """What an undisturbed sequence generates."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Held:
    """A sequence that was admitted."""

    start: pb.Start
    stream: Stream
    tokens: list[int]
    read: int = 0
    started: bool = False
    waited: bool = False

    @property
    def unread(self) -> int:
        return len(self.start.tokens) - self.read


class Stream:
    """The gateway's call of Rounds."""

    def __init__(self, verifier: FakeVerifier):
        self._verifier = verifier
        self._answers: asyncio.Queue[pb.RoundsResponse | BaseException] = asyncio.Queue()
        self.open = True

    async def read(self) -> pb.RoundsResponse:
        answer = await self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def write(self, request: pb.RoundsRequest) -> None:
        if not self.open:
            raise lost()
        self._verifier.receive(self, pb.RoundsRequest.FromString(request.SerializeToString()))

    def answer(self, response: pb.RoundsResponse) -> None:
        if self.open:
            self._answers.put_nowait(response)

    def end(self, error: BaseException) -> None:
        if self.open:
            self.open = False
            self._answers.put_nowait(error)

    def cancel(self) -> None:
        self.end(asyncio.CancelledError())


class Channel:
    """What a stub asks for its methods."""

    def __init__(self, verifier: FakeVerifier):
        self._verifier = verifier

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        method = getattr(self._verifier, path.rsplit("/", 1)[1], None)

        async def call(request: Any, timeout: float | None = None, metadata: object = None) -> Any:
            assert method is not None, path
            return await self._verifier.reached(lambda: method(request), timeout)

        return call

    def stream_stream(self, path: str, **_: object) -> Callable[..., Stream]:
        return lambda metadata=None: self._verifier.opened()

    unary_stream = stream_unary = unary_unary

    async def close(self) -> None:
        pass


def lost() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="nobody is there"
    )


@dataclass(eq=False)
class FakeVerifier:
    """`memory`: positions that all sequences may hold together. `starts`, `admitted`, `first_tokens`: what happened, by
    sequence id, of all lives."""

    slots: int = 64
    memory: int = 1_000_000
    step_seconds: float = 0.01
    budget: int = 512
    alive: bool = True
    starts: list[str] = field(default_factory=list)
    first_tokens: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    generated: Counter[str] = field(default_factory=Counter)
    # Called with the sequences that a step is about to compute, in the midst of it.
    in_step: Callable[[list[str]], None] = lambda ids: None

    def __post_init__(self) -> None:
        self._epochs = count(1)
        self._epoch = next(self._epochs)
        self.held: dict[str, Held] = {}
        self.waiting: dict[str, Held] = {}
        self._preempted: set[str] = set()
        self._streams: list[Stream] = []
        self._batches: list[tuple[Stream, pb.VerifyBatch]] = []
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._going = asyncio.Event()
        self._going.set()

    # -- what a test does to it ----------------------------------------------------------------------------------------

    def connect(self, *_: object, **__: object) -> Channel:
        """Instead of `spire.rpc.channel.connect`."""
        return Channel(self)

    def freeze(self) -> None:
        """As if it was stopped: nothing is answered, and nothing is lost."""
        self._going.clear()

    def die(self) -> None:
        """All that it held is gone, and every call fails."""
        self.alive, self.held, self.waiting, self._batches = False, {}, {}, []
        if self._task:
            self._task.cancel()
            self._task = None
        self.cut()

    def cut(self) -> None:
        """As if the wires to it broke: it lives on."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.end(lost())

    def revive(self) -> None:
        """A new process."""
        self.alive, self._epoch = True, next(self._epochs)
        self._going.set()

    # -- the protocol --------------------------------------------------------------------------------------------------

    async def reached(self, answer: Callable[[], Any], timeout: float | None) -> Any:
        if not self.alive:
            raise lost()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._going.wait()
                return answer()
        raise lost()

    def Check(self, _: object) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    def GetInfo(self, _: object) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            model_name="arithmetic",
            target_fingerprint="fake",
            vocab_size=VOCAB,
            max_context=CONTEXT,
            max_sequences=self.slots,
            epoch=str(self._epoch),
            most_sequences_ahead=self.slots,
        )

    def GetTokenizer(self, _: object) -> pb.GetTokenizerResponse:
        words = {"<unk>": 0, "</s>": 1} | {f"w{token}": token for token in range(2, VOCAB)}
        return pb.GetTokenizerResponse(tokenizer_json=Tokenizer(WordLevel(words, "<unk>")).to_str().encode())

    def Release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        self.released += request.sequence_ids
        for sequence_id in request.sequence_ids:
            held = self.held.pop(sequence_id, None) or self.waiting.pop(sequence_id, None)
            if held and not held.started:
                self._refuse(held.stream, sequence_id, UnknownSequence("released"))
        self._admit()
        return pb.ReleaseResponse(released=len(request.sequence_ids), cache_usage=self.used / self.memory)

    def opened(self) -> Stream:
        stream = Stream(self)
        if self.alive:
            self._streams.append(stream)
            self._task = self._task or asyncio.get_running_loop().create_task(self._run())
        else:
            stream.end(lost())
        return stream

    def receive(self, stream: Stream, request: pb.RoundsRequest) -> None:
        if request.HasField("start"):
            self._start(stream, request.start)
        else:
            self._batches.append((stream, request.verify))
        self._work.set()

    @property
    def used(self) -> int:
        """Positions that are promised."""
        return sum(len(held.tokens) + 1 for held in self.held.values())

    def _start(self, stream: Stream, start: pb.Start) -> None:
        self.starts.append(start.sequence_id)
        self.waiting[start.sequence_id] = new = Held(start, stream, list(start.tokens))
        self._admit()
        if start.sequence_id in self.waiting:
            new.waited = True
            self._stands(new, pb.STAGE_WAITING)

    def _admit(self) -> None:
        while self.waiting:
            sequence_id, first = next(iter(self.waiting.items()))
            needed = len(first.tokens) + 1 + LEAST_RUN * (1 + len(self.held))
            if len(self.held) >= self.slots or (self.held and self.used + needed > self.memory):
                return
            self.held[sequence_id] = self.waiting.pop(sequence_id)
            self.admitted.append(sequence_id)
            if first.waited:
                self._stands(first, pb.STAGE_ADMITTED)
            self._work.set()

    def _stands(self, held: Held, stage: pb.Stage) -> None:
        standing = pb.Standing(sequence_ids=[held.start.sequence_id], stage=stage)
        held.stream.answer(pb.RoundsResponse(standing=standing))

    def _refuse(self, stream: Stream, sequence_id: str, error: SpireError) -> None:
        stream.answer(pb.RoundsResponse(started=pb.Started(sequence_id=sequence_id, status=item_status(error))))

    # -- its steps -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            batches, self._batches = self._batches, []
            chunk = self._chunk()
            if not batches and not chunk:
                self._work.clear()
                continue
            computed = [item.sequence_id for _, batch in batches for item in batch.items]
            self.in_step(computed + [held.start.sequence_id for held in chunk])
            await asyncio.sleep(self.step_seconds)
            await self._going.wait()
            for stream, batch in batches:
                self._verify(stream, batch)
            for held, length in chunk.items():
                self._read(held, length)

    def _chunk(self) -> dict[Held, int]:
        """Positions of prompts that the next step reads."""
        room, chunk = self.budget, {}
        for held in self.held.values():
            if not held.started and room:
                if not held.read:
                    self._stands(held, pb.STAGE_COMPUTED)
                chunk[held] = length = min(room, held.unread)
                room -= length
        return chunk

    def _read(self, held: Held, length: int) -> None:
        sequence_id = held.start.sequence_id
        if self.held.get(sequence_id) is not held:
            return
        held.read += length
        if held.unread:
            return
        held.started = True
        token = following(held.tokens)
        held.tokens.append(token)
        self.first_tokens.append(sequence_id)
        self.generated[sequence_id] += 1
        started = pb.Started(sequence_id=sequence_id, status=OK, base=len(held.start.tokens), token=token)
        held.stream.answer(pb.RoundsResponse(started=started))

    def _verify(self, stream: Stream, batch: pb.VerifyBatch) -> None:
        self._make_room(len(batch.items))
        answer = pb.RoundsResponse()
        answer.verified.batch_id, answer.verified.cache_usage = batch.batch_id, self.used / self.memory
        for item in batch.items:
            result = answer.verified.results.add(sequence_id=item.sequence_id, round=item.round)
            held = self.held.get(item.sequence_id)
            if held is None:
                gone = OutOfCapacity("preempted") if item.sequence_id in self._preempted else UnknownSequence("unknown")
                result.status.CopyFrom(item_status(gone))
            else:
                token = following(held.tokens)
                held.tokens.append(token)
                self.generated[item.sequence_id] += 1
                result.status.CopyFrom(OK)
                result.tokens.append(token)
        stream.answer(answer)

    def _make_room(self, positions: int) -> None:
        while len(self.held) > 1 and self.used + positions > self.memory:
            sequence_id, youngest = self.held.popitem()
            if youngest.started:
                self._preempted.add(sequence_id)
            else:
                self._refuse(youngest.stream, sequence_id, OutOfCapacity("preempted"))
