"""A verifier and a draft that follows it, both in this process, and what the draft is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from draft_service.drafter import Drafter
from draft_service.follower import Follower, subscription
from draft_service.requests import Requests
from draft_service.worker import Worker
from spire.checkpoints.weights import load_draft
from spire.model.backends.reference import Reference
from spire.rpc.channel import connect
from spire.v1 import draft_pb2, draft_pb2_grpc, tensor_pb2, verifier_pb2 as pb
from tests.draft_service.conftest import eventually
from tests.verifier_service.harness import Verifier
from verifier_service.config import VerifierConfig
from verifier_service.serve.server import listening, load

SAMPLED = tensor_pb2.Sampling(temperature=1, top_p=1, seed=5, rule=tensor_pb2.RULE_BLOCK)
GREEDY = tensor_pb2.Sampling(temperature=0, top_p=1)
NAME = "draft"
# How long a request waits for activations.
WAIT_SECONDS = 2.0


def item(
    sequence_id: str, base: int, token: int, k: int = 4, sampling: tensor_pb2.Sampling = SAMPLED
) -> draft_pb2.DraftRequestItem:
    return draft_pb2.DraftRequestItem(sequence_id=sequence_id, base=base, newest_token=token, k=k, sampling=sampling)


def new_backend() -> Reference:
    """Tests replace it."""
    return Reference()


class Following:
    """A verifier, and a draft that may be stopped and started again."""

    def __init__(self, draft: Path, verifier: Verifier, channel: grpc.aio.Channel, shared: str, top_m: int | None):
        self._directory, self._channel, self._shared, self._top_m = draft, channel, shared, top_m
        self.verifier, self.client = verifier, verifier.client()
        self._round = 0

    async def start_draft(self) -> None:
        backend, loop = new_backend(), asyncio.get_running_loop()
        draft = backend.pack(load_draft(self._directory))
        top_m = self._top_m or draft.config.vocab_size
        drafter = Drafter(draft, 8, top_m, self.verifier.info.max_context, backend)
        self.worker = Worker(drafter, WAIT_SECONDS, lambda ids: loop.call_soon_threadsafe(self.follower.resync, ids))
        drafter.q_ring = lambda: self.follower.q_ring
        self.requests = Requests(self.worker)
        stub, request = draft_pb2_grpc.DraftingStub(self._channel), subscription(NAME, draft.draft)
        self.follower = Follower(stub, request, self.worker, self.requests, self._shared)
        self.worker.start()
        self._following = asyncio.create_task(self.follower.run())

        async def ready() -> bool:
            return self.follower.following

        assert await eventually(ready)

    async def stop_draft(self) -> None:
        self._following.cancel()
        await asyncio.wait([self._following])
        self.worker.stop()

    async def start(self, name: str, tokens: list[int], sampling: tensor_pb2.Sampling = SAMPLED) -> int:
        """The first token of a new sequence."""
        started = await self.client.start(name, tokens, sampling, NAME)
        assert started.status.code == tensor_pb2.CODE_OK
        return started.token

    async def ask(self, *items: draft_pb2.DraftRequestItem) -> list[draft_pb2.DraftReplyItem]:
        """What the draft replies to a request that is the test's own."""
        made: Future[draft_pb2.DraftReply] = Future()
        self.requests.take(draft_pb2.DraftRequest(batch_id=1, items=items), made.set_result)
        reply = await asyncio.wait_for(asyncio.wrap_future(made), 20)
        if not reply.HasField("uniform"):
            return list(reply.items)
        k = len(reply.uniform.tokens) // len(items)
        counts = reply.uniform.counts or [k] * len(items)
        return [
            draft_pb2.DraftReplyItem(sequence_id=each.sequence_id, tokens=reply.uniform.tokens[at * k : at * k + count])
            for at, (each, count) in enumerate(zip(items, counts, strict=True))
        ]

    async def decode(self, name: str, rounds: int, k: int, patience: float = 10.0) -> list[pb.VerifyResult]:
        """So many rounds of a sequence, all asked for before the first is answered."""
        for _ in range(rounds):
            self._round += 1
            block = pb.VerifyItem(sequence_id=name, round=self._round, k=k)
            batch = pb.VerifyBatch(batch_id=self._round, items=[block], patience_seconds=patience)
            await self.client.send(pb.RoundsRequest(verify=batch))
        return [(await self.client.read()).verified.results[0] for _ in range(rounds)]


@asynccontextmanager
async def following(
    pair: tuple[Path, Path], shared: str | Path = "", top_m: int | None = None
) -> AsyncIterator[Following]:
    config = VerifierConfig.model_validate(
        {"model": pair[0], "dtype": "float32", "port": 0, "shared_memory": str(shared)}
    )
    engine, hosted = load(config)
    async with listening(engine, hosted, config) as address, connect(address) as channel:
        verifier = Verifier(address, engine, hosted.info)
        both = Following(pair[1], verifier, channel, str(shared), top_m)
        await both.start_draft()
        try:
            yield both
        finally:
            await both.stop_draft()
            await verifier.close()
