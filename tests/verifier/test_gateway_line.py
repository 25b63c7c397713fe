"""A gateway on the verifier's host: its batches and their answers pass by a line, and change nothing by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.errors import PeerLost
from gateway.peers import Asked, VerifierPeer
from spire.errors import InvalidRequest
from spire.rpc import line as lines
from spire.rpc.channel import GATEWAY_METADATA_KEY, HOST_METADATA_KEY, connect
from spire.rpc.host import host_id
from spire.rpc.line import Line, open_line
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb
from spire.v1 import verifier_pb2_grpc as rpc
from tests.verifier.conftest import Running
from tests.verifier.harness import GREEDY, Verifier, answer_on, code_of, plain_greedy, prompt_of, slow_steps

PROMPT = prompt_of(12)


class Near(VerifierPeer):
    """A gateway's end, which counts what it sends by its line."""

    def __init__(self, verifier: Verifier, directory: Path, number: int = 0):
        self.started: asyncio.Queue[pb.Started] = asyncio.Queue()
        self.lost = 0
        super().__init__(
            verifier.address,
            f"near {number}",
            self.started.put_nowait,
            lambda standing: None,
            self._count_loss,
            lambda before, now: None,
            shared_memory=str(directory),
        )

    def _count_loss(self) -> None:
        self.lost += 1

    @property
    def line(self) -> Line | None:
        return self._shortcut.line

    async def begin(self, sequence_id: str) -> None:
        await self.start(pb.Start(sequence_id=sequence_id, tokens=PROMPT, sampling=GREEDY), 10)
        assert (await asyncio.wait_for(self.started.get(), 20)).status.code == tensor_pb2.CODE_OK

    async def rounds(self, sequence_id: str, numbers: range) -> list[int]:
        """The tokens of these rounds, all of which are asked for before the first is answered."""
        asked = [await self.ask_for(sequence_id, number) for number in numbers]
        return [token for each in asked for token in await self.tokens(each)]

    async def ask_for(self, sequence_id: str, number: int) -> Asked[pb.VerifyBatchResult]:
        request = pb.RoundsRequest()
        request.verify.items.add(sequence_id=sequence_id, round=number)
        return await self.ask(request, 20)

    async def tokens(self, asked: Asked[pb.VerifyBatchResult]) -> list[int]:
        return list((await self.answer(asked))[0].results[0].tokens)


@asynccontextmanager
async def met(verifier: Verifier, directory: Path, number: int = 0) -> AsyncIterator[Near]:
    """A gateway that has met the verifier; its line stands if there will be one."""
    peer = Near(verifier, directory, number)
    maintaining = asyncio.create_task(peer.maintain())
    try:
        await until(lambda: peer.usable)
        await peer.begin(f"a{number or ''}")  # whose answer comes behind the offer of a line
        yield peer
    finally:
        maintaining.cancel()
        await asyncio.wait([maintaining])
        await peer.close()


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - plain data
            await asyncio.sleep(0.01)


@pytest.fixture
def sent_by_line(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What passes by lines in this process, both ways."""
    packets: list[bytes] = []
    send = Line.send

    def counted(line: Line, packet: bytes) -> bool:
        gone = send(line, packet)
        packets.extend([packet] if gone else [])
        return gone

    monkeypatch.setattr(Line, "send", counted)
    return packets


async def test_rounds_by_the_line_are_those_of_the_stream(
    running: Running, tmp_path: Path, sent_by_line: list[bytes], target: Any
) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        async with met(verifier, tmp_path) as near:
            by_line = await near.rounds("a", range(1, 21))
            await until(lambda: len(sent_by_line) == 40)  # each batch and its answer
        async with met(verifier, tmp_path / "elsewhere", 1) as far:
            await far.begin("b")
            assert far.line is None
            assert await far.rounds("b", range(1, 21)) == by_line
        assert len(sent_by_line) == 40
    assert by_line == plain_greedy(target, PROMPT, 21)[1:]


async def test_no_batch_overtakes_one_that_went_by_the_stream(
    running: Running, tmp_path: Path, sent_by_line: list[bytes], target: Any
) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, met(verifier, tmp_path) as near:
        slow_steps(verifier)  # so that the first is not answered before the last is asked
        tokens = []
        for first in range(1, 21, 4):
            with pytest.MonkeyPatch.context() as no_packet_is_small_enough:
                no_packet_is_small_enough.setattr(lines, "_MOST_BYTES", 1)
                asked = [await near.ask_for("a", first)]
            asked += [await near.ask_for("a", number) for number in range(first + 1, first + 4)]
            tokens += [token for each in asked for token in await near.tokens(each)]
        assert not sent_by_line
        tokens += await near.rounds("a", range(21, 23))  # nothing is on the stream any more
        await until(lambda: len(sent_by_line) == 4)
    assert tokens == plain_greedy(target, PROMPT, 23)[1:]


async def test_an_answer_too_large_for_a_packet_comes_by_the_stream(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Any
) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, met(verifier, tmp_path) as near:
        send, packets = Line.send, []

        def of_requests_alone(line: Line, packet: bytes) -> bool:
            packets.append(packet)
            return line is near.line and send(line, packet)

        monkeypatch.setattr(Line, "send", of_requests_alone)
        assert await near.rounds("a", range(1, 4)) == plain_greedy(target, PROMPT, 4)[1:]
        assert len(packets) == 6


async def test_a_line_that_breaks_is_met_again_with_the_stream(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, met(verifier, tmp_path) as near:
        await near.rounds("a", range(1, 3))
        assert near.line is not None
        near.line.close()
        await until(lambda: near.lost == 1 and near.usable)
        await near.begin("again")
        assert near.line is not None
        assert len(await near.rounds("again", range(1, 6))) == 5


async def test_who_waits_for_an_answer_by_a_line_that_breaks_is_told(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, met(verifier, tmp_path) as near:
        asked = await near.ask_for("a", 1)
        assert near.line is not None
        near.line.close()
        with suppress(PeerLost):  # unless it was quicker
            await near.answer(asked)
        await until(lambda: near.lost == 1)


class Stream:
    """A gateway's stream by hand."""

    def __init__(self, verifier: Verifier, host: str, name: str = "by hand"):
        self.channel = connect(verifier.address)
        metadata = ((GATEWAY_METADATA_KEY, name), (HOST_METADATA_KEY, host))
        self.call = rpc.VerifierStub(self.channel).Rounds(metadata=metadata)

    async def read(self) -> pb.RoundsResponse:
        return await answer_on(self.call)

    async def start(self) -> pb.RoundsResponse:
        await self.call.write(pb.RoundsRequest(start=pb.Start(sequence_id="a", tokens=PROMPT, sampling=GREEDY)))
        return await self.read()

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


@asynccontextmanager
async def streaming(verifier: Verifier, host: str) -> AsyncIterator[Stream]:
    stream = Stream(verifier, host)
    try:
        yield stream
    finally:
        await stream.close()


@pytest.mark.parametrize("host", ["", "another"])
async def test_a_gateway_on_another_host_is_offered_no_line(running: Running, tmp_path: Path, host: str) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, streaming(verifier, host) as stream:
        assert (await stream.start()).HasField("started")
        assert not await asyncio.to_thread(lambda: list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\xff\xff",
        b"\x12\xff",
        b"\x78\x01",  # a field that nobody knows
        pb.RoundsRequest(start=pb.Start(sequence_id="b", tokens=[1], sampling=GREEDY)).SerializeToString(),
    ],
)
async def test_a_packet_that_cannot_be_read_ends_its_stream_and_nothing_else(
    running: Running, tmp_path: Path, packet: bytes
) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier, met(verifier, tmp_path) as other:
        async with streaming(verifier, host_id()) as stream:
            offer = (await stream.read()).line
            line = await asyncio.to_thread(open_line, tmp_path, offer)
            assert line.send(packet)
            assert await code_of(stream.call) == grpc.StatusCode.INVALID_ARGUMENT
            assert "cannot be taken" in await stream.call.details()
            assert await asyncio.to_thread(line.receive) == b""
        assert len(await other.rounds("a", range(1, 6))) == 5


async def test_no_line_and_no_name_of_one_outlives_its_stream(running: Running, tmp_path: Path) -> None:
    async with running(shared_memory=str(tmp_path)) as verifier:
        async with streaming(verifier, host_id()) as opened, streaming(verifier, host_id()) as left:
            line = await asyncio.to_thread(open_line, tmp_path, (await opened.read()).line)
            assert (await left.read()).HasField("line")
        assert await asyncio.to_thread(line.receive) == b""
        await until(lambda: not list(tmp_path.iterdir()))


def test_an_offer_that_names_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is a file name"):
        open_line(tmp_path, pb.Ring(name="../elsewhere"))
