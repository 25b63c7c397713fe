"""Logs stay bounded whatever repeats, and say how much they left out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import structlog
from hypothesis import given, strategies as st

from spire.service.repeats import MOST, SECONDS, Repeats

FLOOD = """
import logging
import structlog
from spire.service.process import ServiceConfig, run

async def serve(config):
    for number in range(10_000):
        structlog.get_logger().warning("refused", number=number)
        logging.getLogger("asyncio").error("accept failed: %s", number)
        structlog.get_logger().debug("told", number=number)

run("probe", ServiceConfig, serve)
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30)), max_size=200))
def test_nothing_is_lost_that_is_not_counted(lines: list[tuple[str, float]]) -> None:
    clock = Clock()
    repeats = Repeats(clock)
    written = {"a": 0, "b": 0}
    told = {"a": 0, "b": 0}
    for kind, pause in lines:
        clock.now += pause
        if (left_out := repeats.count(kind)) is not None:
            written[kind] += 1
            told[kind] += left_out
    clock.now += SECONDS
    for kind in "ab":
        told[kind] += repeats.count(kind) or 0
        assert written[kind] + told[kind] == sum(other == kind for other, _ in lines)


def test_of_one_kind_few_are_written_a_minute_and_of_others_too() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    for kind in "ab":
        assert [repeats.count(kind) for _ in range(1000)] == [0] * MOST + [None] * (1000 - MOST)
    clock.now = SECONDS
    assert repeats.count("a") == 1000 - MOST


def test_kinds_without_end_take_no_memory_without_end() -> None:
    repeats = Repeats()
    for number in range(5000):
        assert repeats.count(number) == 0
    assert len(repeats._kinds) <= 1000


def test_a_debug_log_leaves_nothing_out() -> None:
    repeats = Repeats()
    for number in range(100):
        assert repeats.processor(None, "debug", {"event": "answered", "number": number})["number"] == number
    for _ in range(MOST):
        repeats.processor(None, "info", {"event": "answered"})
    with pytest.raises(structlog.DropEvent):
        repeats.processor(None, "info", {"event": "answered"})


@pytest.mark.fault(35)
def test_a_flood_of_ours_or_of_a_library_s_is_a_few_lines_of_json() -> None:
    done = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(lines) == 2 * MOST
    assert {line["event"].split(":")[0] for line in lines} == {"refused", "accept failed"}
