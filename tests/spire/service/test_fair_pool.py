"""Work of several askers on few threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import wait

import pytest

from spire.service.fair_pool import FairPool


class Gate:
    """Work that waits until it is let go, and a note of what was done in which order."""

    def __init__(self) -> None:
        self.open, self.begun, self.done = threading.Event(), threading.Event(), list[str]()

    def hold(self, name: str = "held") -> None:
        self.begun.set()
        assert self.open.wait(30)
        self.done.append(name)


def test_askers_take_turns_however_much_one_of_them_has_asked() -> None:
    pool, gate = FairPool(1, "test"), Gate()
    first = pool.submit("flood", gate.hold)
    assert gate.begun.wait(30)
    flood = [pool.submit("flood", gate.done.append, f"flood {at}") for at in range(3)]
    other = [pool.submit("other", gate.done.append, f"other {at}") for at in range(2)]
    gate.open.set()
    wait([first, *flood, *other], 30)
    assert gate.done == ["held", "flood 0", "other 0", "flood 1", "other 1", "flood 2"]


def test_one_asker_never_has_all_threads() -> None:
    pool, gate = FairPool(2, "test"), Gate()
    held = [pool.submit("flood", gate.hold) for _ in range(5)]
    assert gate.begun.wait(30)
    assert pool.submit("other", lambda: "at once").result(30) == "at once"
    gate.open.set()
    wait(held, 30)


async def test_what_nobody_waits_for_is_never_begun() -> None:
    pool, gate = FairPool(1, "test"), Gate()
    held = pool.submit("one", gate.hold)
    abandoned = asyncio.create_task(pool.run("two", gate.done.append, "abandoned"))
    await asyncio.sleep(0)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    gate.open.set()
    assert await pool.run("two", lambda: "next") == "next"
    assert held.done()
    assert gate.done == ["held"]


async def test_an_error_is_raised_where_the_answer_is_awaited_and_ends_no_thread() -> None:
    pool = FairPool(1, "test")

    def panics() -> None:
        raise BaseException("a library's panic")

    with pytest.raises(BaseException, match="panic"):
        await pool.run("one", panics)
    assert await pool.run("one", lambda: 1) == 1
