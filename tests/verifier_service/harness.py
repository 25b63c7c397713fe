"""A client that speaks to the verifier as a gateway does, a subscription as a draft has it, and the references."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import torch

from spire.model.config import ModelConfig
from spire.model.target import Target, WholeSequence
from spire.rpc.carrier import OverwritingRing, RingReader
from spire.rpc.channel import GATEWAY_METADATA_KEY, PROTOCOL_VERSION, STREAM_METADATA_KEY, THIS_PROCESS, connect
from spire.rpc.host import host_id
from spire.rpc.tensors import from_wire, to_wire
from spire.v1 import draft_pb2, draft_pb2_grpc, tensor_pb2, verifier_pb2 as pb, verifier_pb2_grpc as rpc
from verifier_service.engine.batch import RaggedBatch
from verifier_service.engine.engine import VerifierEngine
from verifier_service.engine.step import Outcome, PromptChunk

VOCAB = 300
GREEDY = tensor_pb2.Sampling(temperature=0, top_p=1, seed=1)


# A shape for caches whose numbers do not matter.
TINY = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return [0, *torch.randint(2, VOCAB, (length - 1,), generator=generator).tolist()]


@torch.no_grad()
def plain_greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """Decoding without any cache: the reference everything is held to."""
    tokens = list(prompt)
    for _ in range(count):
        tokens_BT = torch.tensor([tokens])
        hidden_BTD = target(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD
        tokens.append(int(target.unembed(hidden_BTD[0, -1]).argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def whole_taps(target: Target, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Activations [L, N, D] entering the tapped layers, without any cache."""
    tokens_BT = torch.tensor([tokens])
    taps_BTND = target(tokens_BT, WholeSequence(tokens_BT), layers).taps_BTND
    assert taps_BTND is not None
    return taps_BTND[0]


def distribution(ids_KM: torch.Tensor, probs_KM: torch.Tensor) -> pb.DraftDistribution:
    return pb.DraftDistribution(ids=to_wire(ids_KM.int()), probabilities=to_wire(probs_KM.float()))


async def answer_on(
    call: grpc.aio.StreamStreamCall, stand: Callable[[pb.Standing], None] = lambda standing: None
) -> pb.RoundsResponse:
    """What comes next on a gateway's stream, but for the pace, drafts, and how far Starts have come: `stand` hears."""
    while True:
        answer = await asyncio.wait_for(call.read(), 20)
        assert isinstance(answer, pb.RoundsResponse), "the stream has ended"
        if answer.HasField("standing"):
            stand(answer.standing)
        elif answer.WhichOneof("body") not in ("pace", "drafts"):
            return answer


async def code_of(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    """How a stream ends, once all that came on it is read."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await asyncio.wait_for(call.read(), 20) is not grpc.aio.EOF:
            pass
    return await call.code()


class Client:
    """One gateway's stream. Answers are found by sequence id or batch id, in whatever order they come."""

    def __init__(self, address: str, gateway: str = "test", stream: int = 0, caller: str = THIS_PROCESS):
        self.channel = connect(address, caller=caller)
        self.stub = rpc.VerifierStub(self.channel)
        self.name = (GATEWAY_METADATA_KEY, gateway)
        self._call = self.stub.Rounds(metadata=(self.name, (STREAM_METADATA_KEY, str(stream))))
        self._batches = 0
        self.stages: dict[str, list[pb.Stage]] = {}

    async def start(
        self, sequence_id: str, tokens: list[int], sampling: tensor_pb2.Sampling = GREEDY, draft_id: str = ""
    ) -> pb.Started:
        await self.send_start(sequence_id, tokens, sampling, draft_id)
        return (await self.read()).started

    async def send_start(
        self, sequence_id: str, tokens: list[int], sampling: tensor_pb2.Sampling = GREEDY, draft_id: str = ""
    ) -> None:
        await self.send(
            pb.RoundsRequest(
                start=pb.Start(sequence_id=sequence_id, tokens=tokens, sampling=sampling, draft_id=draft_id)
            )
        )

    async def send(self, request: pb.RoundsRequest) -> None:
        await self._call.write(request)

    async def send_verify(self, *items: pb.VerifyItem) -> None:
        self._batches += 1
        await self._call.write(pb.RoundsRequest(verify=pb.VerifyBatch(batch_id=self._batches, items=items)))

    async def verify(self, *items: pb.VerifyItem) -> list[pb.VerifyResult]:
        await self.send_verify(*items)
        answer = (await self.read()).verified
        assert answer.batch_id == self._batches
        assert [result.sequence_id for result in answer.results] == [item.sequence_id for item in items]
        return list(answer.results)

    async def read(self) -> pb.RoundsResponse:
        """The next answer. How far Starts came before it is in `stages`."""
        return await answer_on(self._call, self._stand)

    def _stand(self, standing: pb.Standing) -> None:
        for sequence_id in standing.sequence_ids:
            self.stages.setdefault(sequence_id, []).append(standing.stage)

    async def code(self) -> grpc.StatusCode:
        """How the stream ended."""
        return await code_of(self._call)

    async def release(self, *sequence_ids: str) -> int:
        request = pb.ReleaseRequest(sequence_ids=sequence_ids)
        return (await self.stub.Release(request, metadata=[self.name])).released

    async def close(self) -> None:
        self._call.cancel()
        await self.channel.close()


class Follower:
    """A draft's stream, holding what the packets say it should hold, and replying what a test tells it to."""

    def __init__(
        self,
        address: str,
        info: pb.GetInfoResponse,
        draft_id: str = "draft",
        window: int = 8,
        sink: int = 1,
        shared_memory: Path | None = None,
        caller: str = THIS_PROCESS,
    ):
        self.shared_memory = shared_memory
        self.ring: RingReader | None = None
        self.q_ring: OverwritingRing | None = None
        self.channel = connect(address, caller=caller)
        self.layers = (1, 2)
        self.rows: dict[str, dict[int, torch.Tensor]] = {}
        self.ended: list[str] = []
        self.packets: list[draft_pb2.DraftPacket] = []
        self.request = draft_pb2.Subscription(
            draft_id=draft_id,
            target_fingerprint=info.target_fingerprint,
            protocol_version=PROTOCOL_VERSION,
            tapped_layers=self.layers,
            sink=sink,
            window=window,
            host=host_id() if shared_memory else "",
        )
        self._call = draft_pb2_grpc.DraftingStub(self.channel).Follow()

    async def code(self) -> grpc.StatusCode:
        """How the subscription ended."""
        return await self._call.code()

    async def subscribed(self) -> None:
        await self.write(draft_pb2.DraftMessage(subscription=self.request))
        await self._call.initial_metadata()

    async def write(self, message: draft_pb2.DraftMessage) -> None:
        await self._call.write(message)

    async def resync(self, *sequence_ids: str) -> None:
        await self.write(draft_pb2.DraftMessage(resync=draft_pb2.Resync(sequence_ids=sequence_ids)))

    async def reply(self, reply: draft_pb2.DraftReply) -> None:
        await self.write(draft_pb2.DraftMessage(reply=reply))

    async def asked(self) -> draft_pb2.DraftRequest:
        """The next draft request, after all packets before it."""
        while not (packet := await self.read()).HasField("request"):
            pass
        return packet.request

    async def read(self) -> draft_pb2.DraftPacket:
        packet = await asyncio.wait_for(self._call.read(), 20)
        assert isinstance(packet, draft_pb2.DraftPacket), "the stream has ended"
        self.packets.append(packet)
        self.ended += packet.ended
        if packet.ring.name:
            assert self.shared_memory is not None
            self.ring = RingReader(self.shared_memory, packet.ring)
            self.q_ring = OverwritingRing(self.shared_memory, packet.q_ring)
        rows_RND = self._rows(packet) if packet.spans else torch.empty(0)
        first = 0
        for span in packet.spans:
            if span.reset:
                self.rows[span.sequence_id] = {}
            for offset in range(span.count):
                self.rows.setdefault(span.sequence_id, {})[span.start + offset] = rows_RND[first + offset]
            first += span.count
        assert first == len(rows_RND)
        return packet

    def _rows(self, packet: draft_pb2.DraftPacket) -> torch.Tensor:
        """A copy. What lies in the ring is never released: that is for the test to do."""
        return self.ring.rows(packet).clone() if self.ring else from_wire(packet.rows)

    def leave(self) -> None:
        self._call.cancel()

    async def close(self) -> None:
        self._call.cancel()
        await self.channel.close()


class Verifier:
    """A running service and how to reach it."""

    def __init__(self, address: str, engine: VerifierEngine, info: pb.GetInfoResponse):
        self.address, self.engine, self.info = address, engine, info
        self._opened: list[Client | Follower] = []

    def client(self, gateway: str = "test", stream: int = 0, caller: str = THIS_PROCESS) -> Client:
        self._opened.append(client := Client(self.address, gateway, stream, caller))
        return client

    async def follower(
        self,
        draft_id: str = "draft",
        window: int = 8,
        sink: int = 1,
        shared_memory: Path | None = None,
        caller: str = THIS_PROCESS,
    ) -> Follower:
        follower = Follower(self.address, self.info, draft_id, window, sink, shared_memory, caller)
        self._opened.append(follower)
        await follower.subscribed()
        return follower

    async def close(self) -> None:
        for opened in self._opened:
            await opened.close()


def slow_steps(verifier: Verifier, seconds: float = 0.01) -> None:
    """Let steps take no less than `seconds`, so that a prompt in many chunks is under way for a while."""
    run = verifier.engine.steps.run

    def slowly(batch: RaggedBatch | None, chunk: PromptChunk | None) -> tuple[Outcome | None, Outcome | None]:
        time.sleep(seconds)
        return run(batch, chunk)

    verifier.engine.steps.run = slowly  # type: ignore[method-assign]


# Below what the kernel gives to whoever asks for any port: nobody takes one between two uses of it.
_PORTS = iter(random.sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """One that nobody listens at; no other call gives it again."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port from 20000 to 31999 is free")
