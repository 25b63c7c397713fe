"""The model thread's inbox: what is too much for it is dropped, and followed anew."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draft_service import follower as following_side, worker as module
from draft_service.drafter import Drafter, Verified
from draft_service.follower import Follower
from draft_service.worker import DraftResult, DraftTask, Worker
from spire.decoding.drafting import Drafted, DraftItem
from spire.decoding.sampling import SamplingRows
from spire.errors import OutOfCapacity, UnknownSequence
from spire.rpc.tensors import to_wire
from spire.v1 import draft_pb2 as pb
from tests.gateway.conftest import eventually

MOST = 5
NOTHING = Verified([], torch.empty(0, 1, 1), [])


class Slow:
    """A drafter that absorbs when it may."""

    def __init__(self) -> None:
        self.absorbed, self.forgotten, self.may = 0, 0, threading.Event()

    def absorb(self, verified: Verified) -> list[str]:
        self.absorbed += 1
        assert self.may.wait(20)
        return []

    def forget_all(self) -> None:
        self.forgotten += 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Slow, Worker]]:
    monkeypatch.setattr(module, "MAX_QUEUED", MOST)
    drafter = Slow()
    worker = Worker(cast(Drafter, drafter), 0.0, lambda ids: None)
    worker.start()
    yield drafter, worker
    drafter.may.set()
    worker.stop()


def test_waiting_messages_are_bounded_and_dropped_when_a_draft_restarts(slow: tuple[Slow, Worker]) -> None:
    drafter, worker = slow
    read: list[int] = []
    worker.absorb(NOTHING, lambda: read.append(0))
    eventually(lambda: drafter.absorbed == 1)
    for number in range(MOST):
        worker.absorb(NOTHING, lambda number=number: read.append(1 + number))
    with pytest.raises(OutOfCapacity, match=f"{MOST} messages"):
        worker.absorb(NOTHING, lambda: None)
    worker.forget_all()
    drafter.may.set()
    eventually(lambda: drafter.forgotten == 1)
    assert (drafter.absorbed, read) == (1, list(range(1 + MOST)))
    worker.absorb(NOTHING, lambda: None)
    eventually(lambda: drafter.absorbed == 2)


class Endless:
    """Subscriptions that bring as much as is read."""

    def __init__(self) -> None:
        self.calls = 0
        self.sent: list[AsyncIterator[pb.DraftMessage]] = []

    def Follow(self, messages: AsyncIterator[pb.DraftMessage]) -> Any:
        self.calls += 1
        self.sent.append(messages)
        return self

    async def initial_metadata(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> Any:
        span = pb.ActivationSpan(sequence_id="a", start=0, count=1)
        while True:
            yield pb.DraftPacket(spans=[span], rows=to_wire(torch.zeros(1, 1, 1)))
            await asyncio.sleep(0.001)


NOBODY_ASKS = SimpleNamespace(unanswered=set[int]())


def follower_of(verifier: Endless | None, worker: Worker) -> Follower:
    return Follower(cast(Any, verifier), pb.Subscription(), worker, cast(Any, NOBODY_ASKS), "")


async def test_a_draft_that_is_too_slow_subscribes_again_once_it_has_caught_up(slow: tuple[Slow, Worker]) -> None:
    drafter, worker = slow
    verifier = Endless()
    following = asyncio.create_task(follower_of(verifier, worker).run())
    await asyncio.sleep(1)
    assert (verifier.calls, worker.behind) == (1, True)
    drafter.may.set()
    async with asyncio.timeout(10):
        while verifier.calls < 2:  # noqa: ASYNC110 - plain data
            await asyncio.sleep(0.05)
    assert drafter.absorbed >= 1
    async with asyncio.timeout(10):  # gRPC waits for the next message of a stream until there is none
        assert [message.WhichOneof("body") async for message in verifier.sent[0]] == ["subscription"]
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


async def drafted(worker: Worker, k: int = 0) -> DraftResult:
    task = DraftTask([DraftItem("a", 3, 5)], cast(SamplingRows, None), k)
    worker.draft(task)
    return await asyncio.wrap_future(task.done)


class Starving:
    """A drafter whose sequences are all behind."""

    forgotten = 0

    def forget_all(self) -> None:
        self.forgotten += 1

    def staleness(self, guess: DraftItem) -> int:
        return guess.base

    def behind(self, guess: DraftItem) -> bool:
        return True

    def check(self, guess: DraftItem) -> None:
        raise UnknownSequence("nothing of it has arrived")

    def propose(self) -> None:
        raise AssertionError("nothing can be drafted")


class Stuck(Endless):
    """Subscriptions that stand and bring nothing."""

    async def __aiter__(self) -> Any:
        await asyncio.sleep(60)
        yield pb.DraftPacket()


@pytest.fixture
def starving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(following_side, "_STARVED_SECONDS", 0.3)
    worker = Worker(cast(Drafter, Starving()), 0.0, lambda ids: None)
    worker.start()
    yield worker
    worker.stop()


@pytest.mark.parametrize(("asked", "again"), [(True, True), (False, False)], ids=["proposals wait", "nobody asks"])
async def test_a_stream_that_brings_nothing_is_given_up_if_proposals_wait_for_it(
    starving: Worker, asked: bool, again: bool
) -> None:
    verifier = Stuck()
    following = asyncio.create_task(follower_of(verifier, starving).run())
    until = time.monotonic() + (20 if asked else 1.5)
    while time.monotonic() < until and verifier.calls < 2:
        if asked:
            await drafted(starving)
        await asyncio.sleep(0.05)
    assert (verifier.calls == 2) == again
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


class Flickering(Starving):
    """A drafter whose sequences are behind each second time that one asks."""

    asked = 0

    def behind(self, guess: DraftItem) -> bool:
        self.asked += 1
        return self.asked % 2 == 1


async def test_a_proposal_falling_due_while_others_are_checked_is_answered_once() -> None:
    worker = Worker(cast(Drafter, Flickering()), 0.1, lambda ids: None)
    worker.start()
    try:
        for _ in range(2):  # answering twice would be the thread's end
            async with asyncio.timeout(10):
                answer = await drafted(worker)
            assert list(answer.refused) == [0]
    finally:
        worker.stop()


class Deliberate(Starving):
    """A drafter that takes its time for what arrives, and is behind until it has."""

    arrived = False

    def absorb(self, verified: Verified) -> list[str]:
        time.sleep(0.2)
        self.arrived = True
        return []

    def behind(self, guess: DraftItem) -> bool:
        return not self.arrived


async def test_what_is_absorbed_for_a_proposal_counts_as_its_work_not_as_waiting() -> None:
    worker = Worker(cast(Drafter, Deliberate()), 10.0, lambda ids: None)
    worker.start()
    try:
        began = time.monotonic()
        asked = asyncio.create_task(drafted(worker))
        await asyncio.sleep(0.1)  # it waits for what comes now
        worker.absorb(NOTHING, lambda: None)
        async with asyncio.timeout(10):
            answer = await asked
        assert answer.forward_seconds >= 0.2
        assert 0.1 <= answer.queue_seconds <= time.monotonic() - began - answer.forward_seconds
    finally:
        worker.stop()


class Guessing(Starving):
    """A drafter that is never behind, and whose q lies in memory that may be given back."""

    def __init__(self) -> None:
        self.q: weakref.ref[torch.Tensor] | None = None

    def behind(self, guess: DraftItem) -> bool:
        return False

    def check(self, guess: DraftItem) -> None:
        pass

    def propose(self, guesses: list[DraftItem], k: int, rows: SamplingRows) -> Drafted:
        q = torch.ones(1, k, 4)
        self.q = weakref.ref(q)
        return Drafted(torch.zeros(1, k, dtype=torch.int64), None, q)


@pytest.mark.fault(2)
async def test_an_answer_is_not_held_once_it_is_given() -> None:
    """Its q lies in a ring, which would stay open after its subscription has ended."""
    drafter = Guessing()
    worker = Worker(cast(Drafter, drafter), 0.1, lambda ids: None)
    worker.start()
    try:
        await drafted(worker, k=2)
        assert drafter.q is not None
        async with asyncio.timeout(10):
            while drafter.q() is not None:  # noqa: ASYNC110 - a weak reference tells nobody
                await asyncio.sleep(0.01)
    finally:
        worker.stop()


@pytest.mark.fault(2)
async def test_a_subscription_broken_while_opening_memory_leaves_no_thread() -> None:
    follower, may = follower_of(None, cast(Worker, None)), threading.Event()

    def opened(offers: pb.DraftPacket) -> tuple[None, None]:
        may.wait(20)
        return None, None

    follower._opened = opened  # type: ignore[method-assign]
    before = threading.active_count()
    for _ in range(4):
        opening = asyncio.create_task(follower._open(pb.DraftPacket()))
        await asyncio.sleep(0.05)
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await opening
    assert threading.active_count() == before + 1
    may.set()
