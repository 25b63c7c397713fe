"""A draft that the verifier asks: by the line where they share a host, by gRPC whatever becomes of the line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draft_service import activations
from draft_service.activations import Follower, subscription
from draft_service.drafter import Drafter
from draft_service.orders import Orders
from draft_service.worker import Worker
from spire.model.checkpoint import load_draft
from spire.rpc import line as lines
from spire.rpc.channel import connect
from spire.rpc.drafting import DraftServicer
from spire.v1 import draft_pb2, draft_pb2_grpc, tensor_pb2
from spire.v1 import verifier_pb2 as pb
from spire.v1 import verifier_pb2_grpc as rpc
from tests.draft.test_service import eventually
from tests.verifier.harness import Client, Verifier
from verifier_service.config import VerifierConfig
from verifier_service.server import listening, load

SAMPLED = tensor_pb2.Sampling(temperature=1, top_p=1, seed=5, rule=tensor_pb2.RULE_BLOCK)
DEPTH = 3


class Following:
    """A draft and its verifier in this process, with a sequence."""

    def __init__(self, follower: Follower, orders: Orders, client: Client):
        self.follower, self.orders, self.client = follower, orders, client
        self.round = 0

    async def ready(self) -> bool:
        return self.follower.following and self.orders.connected

    async def decode(self, rounds: int, patience: float = 10.0) -> list[pb.VerifyResult]:
        """So many rounds of the sequence, all ordered before the first is answered."""
        for _ in range(rounds):
            self.round += 1
            item = pb.VerifyItem(sequence_id="a", round=self.round, k=DEPTH)
            batch = pb.VerifyBatch(batch_id=self.round, items=[item], patience_seconds=patience)
            await self.client.send(pb.RoundsRequest(verify=batch))
        return [(await self.client.read()).verified.results[0] for _ in range(rounds)]

    def by_grpc(self) -> int:
        """Answers that went by the stream."""
        return self.orders.answered


@asynccontextmanager
async def following(
    pair: tuple[Path, Path], shared: Path, sampling: tensor_pb2.Sampling = SAMPLED
) -> AsyncIterator[Following]:
    config = VerifierConfig.model_validate(
        {"model": pair[0], "dtype": "float32", "port": 0, "shared_memory": str(shared)}
    )
    engine, hosted = load(config)
    async with listening(engine, hosted, config) as address, connect(address) as channel:
        draft = load_draft(pair[1])
        drafter = Drafter(draft, 4, draft.config.vocab_size, hosted.info.max_context)
        worker = Worker(drafter, 1.0, lambda ids: None)
        servicer = DraftServicer(draft_pb2.DraftGetInfoResponse, worker.propose, 16, "cpu", lambda: follower.q_ring)
        orders = Orders(draft_pb2_grpc.DraftingStub(channel), "draft", servicer, worker)
        follower = Follower(rpc.VerifierStub(channel), subscription("draft", draft.draft), worker, str(shared), orders)
        verifier = Verifier(address, engine, hosted.info)
        drafter.q_ring = lambda: follower.q_ring
        worker.start()
        tasks = [asyncio.create_task(loop) for loop in (follower.run(), orders.run())]
        both = Following(follower, orders, verifier.client())
        try:
            assert await eventually(both.ready)
            started = await both.client.start("a", [1, 2, 3, 4, 5], sampling, "draft")
            assert started.status.code == tensor_pb2.CODE_OK
            yield both
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            worker.stop()
            await verifier.close()


def texts(results: list[pb.VerifyResult]) -> list[tuple[int, list[int]]]:
    return [(result.drafted, list(result.tokens)) for result in results]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SAMPLED, id="judged by q"),
        pytest.param(tensor_pb2.Sampling(top_p=1), id="greedy"),
        pytest.param(tensor_pb2.Sampling(temperature=1, top_p=1, rule=tensor_pb2.RULE_INVARIANT), id="invariant"),
    ],
)
async def test_what_goes_by_the_line_is_what_would_go_by_grpc(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: tensor_pb2.Sampling
) -> None:
    async with following(pair, tmp_path, sampling) as both:
        by_line = await both.decode(10)
        assert both.by_grpc() == 0
    monkeypatch.setattr(lines, "_MOST_BYTES", 1)
    async with following(pair, tmp_path, sampling) as both:
        by_grpc = await both.decode(10)
        assert both.by_grpc() == 10
    assert texts(by_line) == texts(by_grpc)
    assert {result.drafted for result in by_line} == {DEPTH}
    assert sum(result.accepted for result in by_line) > 0


async def test_where_no_line_can_be_opened_rows_still_go_through_shared_memory(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> lines.Line:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(activations, "open_line", refused)
    async with following(pair, tmp_path) as both:
        assert {result.drafted for result in await both.decode(3)} == {DEPTH}
        assert both.by_grpc() == 3
        assert both.follower.bytes_received[activations.SHARED_MEMORY] > 0
        assert both.follower.bytes_received[activations.INLINE] == 0


async def test_when_a_line_breaks_the_next_rounds_are_drafted_by_grpc(pair: tuple[Path, Path], tmp_path: Path) -> None:
    async with following(pair, tmp_path) as both:
        assert {result.drafted for result in await both.decode(3)} == {DEPTH}
        assert both.follower.line is not None
        both.follower.line.close()
        await both.decode(1, patience=1.0)  # what was on its way when it broke is decoded plainly
        assert {result.drafted for result in await both.decode(5)} == {DEPTH}
        assert both.by_grpc() >= 5


async def test_a_packet_that_cannot_be_read_costs_neither_side_its_thread(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    async with following(pair, tmp_path) as both:
        assert both.follower.line is not None
        assert both.follower.line.send(b"\xff\xff\xff")
        await both.decode(1, patience=1.0)
        assert {result.drafted for result in await both.decode(3)} == {DEPTH}
