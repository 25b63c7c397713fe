"""How activations travel is found out by the two services, leaves nothing behind, and no text depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from torch import Tensor

from draft_service.drafter import Verified
from draft_service.follower import Follower
from spire.rpc.carrier import INLINE, SHARED_MEMORY, Ring
from spire.rpc.channel import connect, new_server
from spire.rpc.tensors import to_wire, without_data
from spire.v1 import draft_pb2 as pb, draft_pb2_grpc as rpc, verifier_pb2
from tests.draft_service.conftest import eventually
from tests.draft_service.test_service import accepted_tokens, complete, wait_until
from tests.draft_service.test_worker import NOBODY_ASKS
from tests.services import Service, Services, running
from tests.untrained import untrained_draft
from tests.verifier_service.harness import free_port

LONG = {"prompt": [1, 2, 3], "max_tokens": 60, "temperature": 0}
# Which draft tokens stand depends on every bit of q.
SAMPLED = LONG | {"temperature": 1, "seed": 7, "speculation": {"rule": "block"}}


def carriers(draft: Service | None) -> list[str]:
    """What the draft's log says of each of its subscriptions."""
    assert draft is not None
    lines = [json.loads(line) for line in draft.log.read_text().splitlines() if line.startswith("{")]
    return [line["carrier"] for line in lines if "carrier" in line]


def activation_bytes(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(r'^spire_draft_activation_bytes_total{carrier="(\w+)"} (\S+)', text, re.MULTILINE)
    return {carrier: float(count) for carrier, count in found}


@pytest.mark.parametrize("own", [None, torch.arange(256, 512)], ids=["whole vocabulary", "own vocabulary"])
def test_one_host_uses_shared_memory_and_gives_the_text_of_inline_bytes(
    own: Tensor | None, pair: tuple[Path, Path], stories_dir: Path, tmp_path: Path
) -> None:
    texts = []
    if own is not None:
        pair = stories_dir, untrained_draft(stories_dir, tmp_path / "draft", layers=(3, 4), window=16, own=own)
    for shared, carrier in (([], SHARED_MEMORY), (["--shared-memory", ""], INLINE)):
        port = free_port()
        options = ["--target", str(pair[0]), *shared]
        with running(*pair, draft_options=["--metrics-port", str(port), *options]) as services:
            answers = [complete(services.url, body) for body in (LONG, SAMPLED)]
            texts.append([(answer["choices"][0]["text"], accepted_tokens(answer)) for answer in answers])
            assert all(accepted for _, accepted in texts[-1])
            assert carriers(services.draft) == [carrier]
            counted = activation_bytes(port)
            assert {name for name, count in counted.items() if count} == {carrier}, counted
    assert texts[0] == texts[1]


def test_a_draft_without_access_to_shared_memory_asks_for_inline_bytes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """As in containers of one host that share no directory."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir(mode=0o700)
    ours.mkdir(mode=0o700)
    with shared_in(pair, theirs, ours) as services:
        assert wait_until(lambda: carriers(services.draft) == [INLINE])
        assert accepted_tokens(complete(services.url, LONG)) > 0
        assert wait_until(lambda: not list(theirs.iterdir())), "what could not be opened is removed"


def test_a_verifier_that_cannot_make_the_memory_sends_inline_bytes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with shared_in(pair, tmp_path / "missing", tmp_path) as services:
        assert wait_until(lambda: carriers(services.draft) == [INLINE])
        assert accepted_tokens(complete(services.url, LONG)) > 0


def test_nothing_is_left_behind_by_a_killed_draft_and_a_new_one_goes_on(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with shared_in(pair, tmp_path, tmp_path) as services:
        assert services.draft is not None
        for _ in range(2):
            assert wait_until(lambda: carriers(services.draft) == [SHARED_MEMORY])
            assert wait_until(lambda: accepted_tokens(complete(services.url, LONG)) > 0)
            assert wait_until(lambda: rings_mapped(services.verifier.process.pid) == 2)
            services.draft.kill()
            assert not list(tmp_path.iterdir())
            assert wait_until(lambda: rings_mapped(services.verifier.process.pid) == 0), "its memory is free again"
            services.restart_draft()


def test_nothing_is_left_behind_by_a_killed_verifier(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with shared_in(pair, tmp_path, tmp_path) as services:
        assert services.draft is not None
        assert wait_until(lambda: carriers(services.draft) == [SHARED_MEMORY])
        services.verifier.kill()
        assert not list(tmp_path.iterdir())
        assert wait_until(lambda: rings_mapped(services.draft.process.pid) == 0), "its memory is free again"


def shared_in(pair: tuple[Path, Path], verifier: Path, draft: Path) -> contextlib.AbstractContextManager[Services]:
    return running(
        *pair,
        verifier_options=["--shared-memory", str(verifier)],
        draft_options=["--shared-memory", str(draft)],
    )


def rings_mapped(pid: int) -> int:
    return len(re.findall(r"spire-\w+\.ring", Path(f"/proc/{pid}/maps").read_text()))


class LyingVerifier(rpc.DraftingServicer):
    """Sends rows at a place outside the ring it offers, and good ones to who asks for inline bytes."""

    def __init__(self, directory: Path):
        self.ring = Ring(directory, 4096)
        self.hosts: list[str] = []
        self.lost = asyncio.Event()

    async def Follow(
        self, messages: AsyncIterator[pb.DraftMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DraftPacket]:
        request = (await anext(messages)).subscription
        self.hosts.append(request.host)
        await context.send_initial_metadata(())
        spans, rows_RND = [pb.ActivationSpan(sequence_id="a", count=3, reset=True)], torch.ones(3, 1, 64)
        if request.host:
            yield pb.DraftPacket(ring=self.ring.offer)
            place = verifier_pb2.RingSlice(position=4096 - 64, length=rows_RND.nbytes)
            yield pb.DraftPacket(spans=spans, rows=without_data(rows_RND), slice=place)
        else:
            yield pb.DraftPacket(spans=spans, rows=to_wire(rows_RND))
        await self.lost.wait()


class Absorbed:
    """In the place of the draft's worker: keeps what it is told to absorb."""

    behind = False

    def __init__(self) -> None:
        self.messages: list[Verified] = []

    def forget_all(self) -> None:
        self.messages.clear()

    def starves(self, floor: float) -> bool:
        return False

    def absorb(self, verified: Verified, then: object) -> None:
        self.messages.append(verified)


async def test_rows_outside_the_ring_are_refused_and_asked_for_inline(tmp_path: Path) -> None:
    server, verifier, worker = new_server(), LyingVerifier(tmp_path), Absorbed()
    rpc.add_DraftingServicer_to_server(verifier, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        stub, request, nobody_asks = (
            rpc.DraftingStub(channel),
            pb.Subscription(draft_id="draft"),
            cast(Any, NOBODY_ASKS),
        )
        follower = Follower(stub, request, worker, nobody_asks, str(tmp_path))  # type: ignore[arg-type]
        following = asyncio.create_task(follower.run())
        try:

            async def absorbed() -> bool:
                return bool(worker.messages)

            assert await eventually(absorbed)
            assert [bool(host) for host in verifier.hosts] == [True, False]
            assert torch.equal(worker.messages[0].rows_RND, torch.ones(3, 1, 64))
            verifier.lost.set()

            async def subscribed_again() -> bool:
                return len(verifier.hosts) > 2

            assert await eventually(subscribed_again)
            assert verifier.hosts[2], "another verifier may share memory"
            assert not following.done()
        finally:
            following.cancel()
            await server.stop(None)
