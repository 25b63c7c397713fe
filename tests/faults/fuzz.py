"""`make fuzz`: wrong messages by the hundred thousand for the verifier, while clients' texts may not change.

    python -m tests.faults.fuzz --messages 100000 --seed 1

Each is right but for one field, or made up field by field, or bytes gone bad. Groups of them go over streams and calls
of their own; each has to be answered or refused by name, and no process may die, hang or hold more than before. A
message that breaks something is found again by its seed. Exit status 1 when a bound breaks.
What it does not know: messages that are right one by one and wrong together (test_protocol_model.py).
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import Progress

from spire.rpc.channel import GATEWAY_METADATA_KEY, PROTOCOL_VERSION, STREAM_METADATA_KEY, connect
from spire.v1 import draft_pb2, tensor_pb2, verifier_pb2
from tests.faults.history import Load, bodies
from tests.faults.system import System, system
from tests.paths import ROOT

MODELS = ROOT / "models"
GROUP = 50
FOLLOW = "/spire.v1.Drafting/Follow"
PATIENCE = 60.0
IDS = ("a", "b", "c", "d", "", "x" * 257, "\x00", "日本")
INTEGERS = (0, 1, 2, 3, 4, 5, 8, 16, 17, 299, 300, 511, 512, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
FLOATS = (0.0, 1.0, 0.5, -1.0, 2.0, 1e-38, 1e38, float("nan"), float("inf"), float("-inf"))
TEXTS = (*IDS, "{}", '{"type": "integer"}', "[a-z]{1,9}", "(", 'start: "x"', "[" * 1000)
MANY = 3000

console = Console(stderr=True)


class Hostile:
    """Messages that a peer should never send, from one seed."""

    def __init__(self, rng: random.Random, fingerprint: str):
        self.rng, self.fingerprint = rng, fingerprint

    def readable(self, message: Message) -> bytes:
        """A message of this type, not what it was."""
        if self.rng.random() < 0.6:
            self._spoil(message)
        else:
            message.Clear()
            self._fill(message, depth=0)
        return message.SerializeToString()

    def wire(self, message: Message) -> bytes:
        """The same, or bytes that may be no message at all."""
        if self.rng.random() < 0.6:
            return self.readable(message)
        return self._mangle(message.SerializeToString())

    def stream(self, right: Callable[[], Message]) -> list[bytes]:
        """So many of them that can be read, and a last one that may end the stream."""
        return [*(self.readable(right()) for _ in range(GROUP - 1)), self.wire(right())]

    def _spoil(self, message: Message) -> None:
        """Another value in one field, anywhere in it."""
        if not message.DESCRIPTOR.fields:
            return
        here = self.rng.choice(message.DESCRIPTOR.fields)
        inner = [(field, value) for field, value in message.ListFields() if field.message_type and not _is_map(field)]
        if inner and self.rng.random() < 0.8:
            chosen, value = self.rng.choice(inner)
            below = self.rng.choice(value) if chosen.is_repeated else value
            self._spoil(below)
        else:
            message.ClearField(here.name)
            self._set(message, here, depth=0)

    def _fill(self, message: Message, depth: int) -> None:
        for one in message.DESCRIPTOR.fields:
            if self.rng.random() < (0.8 if depth < 3 else 0.2):
                self._set(message, one, depth)

    def _set(self, message: Message, one: FieldDescriptor, depth: int) -> None:
        target = getattr(message, one.name)
        if _is_map(one):
            for _ in range(self.rng.randrange(4)):
                target[self._scalar(one.message_type.fields_by_name["key"])] = self._scalar(
                    one.message_type.fields_by_name["value"]
                )
        elif one.is_repeated and one.message_type:
            for _ in range(self.rng.randrange(4)):
                self._fill(target.add(), depth + 1)
        elif one.is_repeated:
            count = MANY if self.rng.random() < 0.02 else self.rng.randrange(6)
            target.extend(self._scalar(one) for _ in range(count))
        elif one.message_type:
            self._fill(target, depth + 1)
        else:
            setattr(message, one.name, self._scalar(one))

    def _scalar(self, one: FieldDescriptor) -> Any:
        match one.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if one.type == FieldDescriptor.TYPE_BYTES:
                return self.rng.randbytes(self.rng.choice((0, 1, 4, 16, 1000)))
            case FieldDescriptor.CPPTYPE_STRING:
                return self.fingerprint if one.name == "target_fingerprint" else self.rng.choice(TEXTS)
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self.rng.choice(FLOATS)
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.rng.choice((0, 1, 2, 3, 99))
            case _:
                return self.rng.choice(INTEGERS)

    def _mangle(self, wire: bytes) -> bytes:
        changed = bytearray(wire or b"\x00")
        for _ in range(self.rng.randrange(1, 4)):
            at = self.rng.randrange(len(changed))
            match self.rng.randrange(4):
                case 0:
                    changed[at] ^= 1 << self.rng.randrange(8)
                case 1:
                    del changed[at + 1 :]
                case 2:
                    changed[at:at] = self.rng.randbytes(self.rng.randrange(1, 9))
                case _:
                    changed += changed[: self.rng.randrange(len(changed) + 1)]
        return bytes(changed)


def _is_map(one: FieldDescriptor) -> bool:
    return bool(one.message_type and one.message_type.GetOptions().map_entry)


def sampling() -> tensor_pb2.Sampling:
    return tensor_pb2.Sampling(temperature=1, top_p=1, seed=3)


def start(rng: random.Random) -> verifier_pb2.RoundsRequest:
    tokens = [1, *(rng.randrange(2, 300) for _ in range(rng.randrange(1, 30)))]
    adjustments = verifier_pb2.Adjustments(
        logit_bias={5: 1.0}, allowed_tokens=[3, 4, 5], end_tokens=[2], grammar=verifier_pb2.Grammar(regex="[a-z]+")
    )
    chosen = rng.choice(IDS[:4])
    begun = verifier_pb2.Start(sequence_id=chosen, tokens=tokens, sampling=sampling(), draft_id="nobody", logprobs=2)
    if rng.random() < 0.3:
        begun.adjustments.CopyFrom(adjustments)
    return verifier_pb2.RoundsRequest(start=begun)


def verify(rng: random.Random) -> verifier_pb2.RoundsRequest:
    k = rng.randrange(4)
    q = verifier_pb2.DraftDistribution(
        ids=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[k, 1], data=b"\x05\x00\x00\x00" * k),
        probabilities=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[k, 1], data=b"\x00\x00\x80\x3f" * k),
    )
    if rng.random() < 0.2:
        q.probabilities_slice.CopyFrom(verifier_pb2.RingSlice(position=rng.randrange(2**64), length=4 * k))
    items = [
        verifier_pb2.VerifyItem(
            sequence_id=name, round=rng.randrange(1, 4), base=rng.randrange(2, 40), draft_tokens=[5] * k, q=q
        )
        if rng.random() < 0.7
        else verifier_pb2.VerifyItem(sequence_id=name, round=rng.randrange(1, 4), k=k)
        for name in rng.sample(IDS[:4], rng.randrange(1, 4))
    ]
    return verifier_pb2.RoundsRequest(verify=verifier_pb2.VerifyBatch(batch_id=rng.randrange(9), items=items))


def guess(rng: random.Random) -> draft_pb2.DraftReply:
    items = [
        draft_pb2.DraftReplyItem(
            sequence_id=name, status=tensor_pb2.ItemStatus(code=tensor_pb2.CODE_OK), tokens=[5, 6, 7]
        )
        for name in rng.sample(IDS[:4], 2)
    ]
    return draft_pb2.DraftReply(batch_id=rng.randrange(9), items=items)


@dataclass
class Sent:
    """What was sent, and what came back."""

    messages: int = 0
    answers: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    # What a peer may never see: no answer at all, or an exception nobody expected.
    broken: list[str] = field(default_factory=list)

    def status(self, code: grpc.StatusCode, details: str | None) -> None:
        """How a stream or a call ended."""
        self.statuses[code.name] += 1
        # gRPC's own words, to bytes that are no message and of writing to a stream that has ended.
        known = any(words in (details or "") for words in ("DecodeError", "Internal error from Core"))
        if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL) and not known:
            self.broken.append(f"before message {self.messages}: {code.name}: {details}")
        if code is grpc.StatusCode.UNAVAILABLE:
            self.broken.append(f"before message {self.messages}: the service went away: {details}")


@dataclass
class Fuzz:
    """Sends to the verifier, which alone is called. A channel lives as long as somebody holds it."""

    verifier: grpc.aio.Channel
    rng: random.Random
    hostile: Hostile
    sent: Sent = field(default_factory=Sent)

    async def group(self) -> None:
        """One stream or a few calls of wrong messages; waits until all has been answered."""
        number = self.sent.messages
        kinds = [self._rounds, self._rounds, self._guess, self._calls, self._follow]
        chosen = self.rng.choice(kinds)
        try:
            await asyncio.wait_for(chosen(), PATIENCE)
        except TimeoutError:
            self.sent.broken.append(f"{chosen.__name__} at message {number} was not answered within {PATIENCE:.0f} s")

    async def _rounds(self) -> None:
        wires = self.hostile.stream(lambda: (start if self.rng.random() < 0.4 else verify)(self.rng))
        self.sent.messages += GROUP
        # Of one gateway's streams only the newest is read: so they are rarely of the same.
        gateway = "fuzz" if self.rng.random() < 0.05 else f"fuzz {self.sent.messages}"
        metadata = ((GATEWAY_METADATA_KEY, gateway), (STREAM_METADATA_KEY, self.rng.choice(("0", "1", "-1", "x"))))
        await self._stream(self.verifier.stream_stream("/spire.v1.Verifier/Rounds")(metadata=metadata), wires)
        release = verifier_pb2.ReleaseRequest(sequence_ids=IDS).SerializeToString()
        await self._ended(self.verifier.unary_unary("/spire.v1.Verifier/Release")(release, metadata=metadata))

    async def _guess(self) -> None:
        """Replies and Resyncs of a draft whose subscription is right."""
        resync = draft_pb2.DraftMessage(resync=draft_pb2.Resync(sequence_ids=self.rng.sample(IDS, 3)))
        right = lambda: resync if self.rng.random() < 0.1 else draft_pb2.DraftMessage(reply=guess(self.rng))  # noqa: E731
        wires = [self._subscription().SerializeToString(), *self.hostile.stream(right)]
        self.sent.messages += GROUP
        await self._stream(self.verifier.stream_stream(FOLLOW)(), wires)

    def _subscription(self) -> draft_pb2.DraftMessage:
        right = draft_pb2.Subscription(
            draft_id=self.rng.choice(("d1", "d2", "d3")),
            target_fingerprint=self.hostile.fingerprint,
            protocol_version=PROTOCOL_VERSION,
            tapped_layers=[0],
            sink=1,
            window=8,
        )
        return draft_pb2.DraftMessage(subscription=right)

    async def _calls(self) -> None:
        release = lambda: verifier_pb2.ReleaseRequest(sequence_ids=self.rng.sample(IDS, 3))  # noqa: E731
        for path, right in (("Release", release), ("GetInfo", verifier_pb2.GetInfoRequest)):
            for _ in range(GROUP // 10):
                self.sent.messages += 1
                call = self.verifier.unary_unary(f"/spire.v1.Verifier/{path}")
                await self._ended(call(self.hostile.wire(right()), metadata=[(GATEWAY_METADATA_KEY, "fuzz")]))

    async def _follow(self) -> None:
        """Subscriptions: one that is taken never ends by itself."""
        for _ in range(GROUP // 10):
            self.sent.messages += 1
            call = self.verifier.stream_stream(FOLLOW)()
            try:
                await call.write(self.hostile.wire(self._subscription()))
                await asyncio.wait_for(call.read(), 0.2)
                self.sent.answers += 1
                if not call.done():
                    continue
                self.sent.status(await call.code(), await call.details())
            except TimeoutError:
                self.sent.statuses["followed"] += 1
            except grpc.aio.AioRpcError as error:
                self.sent.status(error.code(), error.details())
            finally:
                call.cancel()

    async def _stream(self, call: grpc.aio.StreamStreamCall[bytes, bytes], wires: list[bytes]) -> None:
        try:
            # Who reads hears of the end; who writes to a stream that has ended hears of it in some other way.
            writer = asyncio.create_task(_write(call, wires))
            while await call.read() is not grpc.aio.EOF:
                self.sent.answers += 1
            await writer
            self.sent.status(await call.code(), await call.details())
        except grpc.aio.AioRpcError as error:
            self.sent.status(error.code(), error.details())
        finally:
            writer.cancel()
            call.cancel()

    async def _ended(self, call: grpc.aio.UnaryUnaryCall[bytes, bytes]) -> None:
        try:
            await call
            self.sent.answers += 1
            self.sent.status(grpc.StatusCode.OK, "")
        except grpc.aio.AioRpcError as error:
            self.sent.status(error.code(), error.details())


async def _write(call: grpc.aio.StreamStreamCall[bytes, bytes], wires: list[bytes]) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        for wire in wires:
            await call.write(wire)
        await call.done_writing()


async def attack(whole: System, messages: int, seed: int, tick: Callable[[int], None]) -> Sent:
    """Send so many messages to the verifier, as gateways and drafts."""
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(connect(whole.verifier.address))
        info = await verifier.unary_unary("/spire.v1.Verifier/GetInfo")(b"")
        fingerprint = verifier_pb2.GetInfoResponse.FromString(info).target_fingerprint
        fuzz = Fuzz(verifier, rng, Hostile(rng, fingerprint))
        while fuzz.sent.messages < messages and len(fuzz.sent.broken) < 10:
            await fuzz.group()
            tick(fuzz.sent.messages)
    return fuzz.sent


def fuzzed(whole: System, messages: int, seed: int, tick: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """The figures, and in `broken` everything that should not be. Clients stream all the while."""
    with Load(whole.url, [record.body for record in whole.expected.values()], repeat=True) as load:
        sent = asyncio.run(attack(whole, messages, seed, tick))
        gc.collect()  # calls that were cancelled hold their channel, and the channel a descriptor of the verifier
        services = {"verifier": whole.verifier, "draft": whole.draft, "gateway": whole.gateway}
        dead = [name for name, service in services.items() if service.process.poll() is not None]
        unhealed = _unhealed(whole)
    broken = {
        "answers": sent.broken,
        "dead": dead,
        "unhealed": unhealed,
        "clients": whole.wrong(load.records),
        "still held": whole.leaks(),
    }
    return {
        "messages": sent.messages,
        "answers": sent.answers,
        "statuses": dict(sent.statuses),
        "clients' requests": len(load.records),
        "broken": {what: found for what, found in broken.items() if found},
    }


def _unhealed(whole: System) -> dict[str, str]:
    """What the services say last, if they do not find back to one another."""
    try:
        whole.heal()
    except AssertionError:
        services = {"verifier": whole.verifier, "draft": whole.draft, "gateway": whole.gateway}
        return {name: service.log.read_text()[-2000:] for name, service in services.items()}
    return {}


def main(
    messages: Annotated[int, typer.Option(help="How many.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Decides which.")] = 1,
    out: Annotated[Path, typer.Option(help="Figures, as JSON.")] = Path("build/fuzz.json"),
) -> None:
    """Send wrong messages past the gateway for a while, and say what they broke."""
    with system(MODELS / "target", MODELS / "draft", verifier_options=["--lease-seconds", "3"]) as whole:
        whole.learn(bodies(4))
        with Progress(console=console) as progress:
            task = progress.add_task("fuzzing", total=messages)
            verdict = fuzzed(whole, messages, seed, lambda sent: progress.update(task, completed=sent))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(verdict, indent=1) + "\n")
    print(json.dumps(verdict))
    raise typer.Exit(1 if verdict["broken"] else 0)


if __name__ == "__main__":
    typer.run(main)
