"""A model's thread does not wait for others' turns."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spire.turns import take_short_turns

_KNOWS_TURNS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)


def nanoseconds() -> int:
    """Of a turn of the calling thread, as the kernel has it."""
    told = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text()
    return int(next(line.split()[-1] for line in told.splitlines() if line.startswith("se.slice")))


def on_a_thread(does: Callable[[], tuple[bool, int]]) -> tuple[bool, int]:
    results: list[tuple[bool, int]] = []
    thread = threading.Thread(target=lambda: results.append(does()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(not _KNOWS_TURNS, reason="before Linux 6.12 turns are of one length")
@pytest.mark.skipif(not Path("/proc/self/sched").exists(), reason="this kernel does not tell")
def test_a_thread_that_asks_for_short_turns_has_them_alone() -> None:
    before = nanoseconds()
    taken, of_thread = on_a_thread(lambda: (take_short_turns(), nanoseconds()))
    if not taken:
        pytest.skip("this container may not ask")
    assert of_thread == 100_000 < before == nanoseconds()


def test_a_thread_of_lower_priority_keeps_it() -> None:
    def lowered() -> tuple[bool, int]:
        os.setpriority(os.PRIO_PROCESS, 0, 5)
        return take_short_turns(), os.getpriority(os.PRIO_PROCESS, 0)

    assert on_a_thread(lowered)[1] == 5


def test_a_thread_of_another_policy_is_left_as_it_is() -> None:
    def of_batch() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return take_short_turns(), os.sched_getscheduler(0)

    assert on_a_thread(of_batch) == (False, os.SCHED_BATCH)
