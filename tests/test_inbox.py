"""What one thread is given by others and by lines: all of it, in order, and soon, however deeply it sleeps."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spire.rpc.inbox import Inbox
from spire.rpc.line import Line

MOST = 256


@contextmanager
def pair() -> Iterator[tuple[Line, Line]]:
    ends = [Line(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def nothing() -> None:
    return None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=8)), max_size=40))
def test_all_that_comes_is_taken_and_from_each_in_its_order(sent: list[tuple[int, bytes]]) -> None:
    inbox: Inbox[tuple[int, bytes]] = Inbox()
    with pair() as (near_1, far_1), pair() as (near_2, far_2):
        inbox.read(near_1, lambda packet: (1, packet), nothing)
        inbox.read(near_2, lambda packet: (2, packet), nothing)
        for source, packet in sent:
            if source:
                assert (far_1, far_2)[source - 1].send(packet)
            else:
                inbox.put((0, packet))
        taken: list[tuple[int, bytes]] = []
        while len(taken) < len(sent):
            taken += inbox.take(MOST, 5)
        for source in range(3):
            assert [item for item in taken if item[0] == source] == [item for item in sent if item[0] == source]
        assert inbox.take(MOST, 0) == []


@pytest.mark.parametrize("by_line", [False, True])
def test_a_thread_that_waits_for_anything_is_woken(by_line: bool) -> None:
    inbox: Inbox[bytes] = Inbox()
    with pair() as (near, far):
        taken: list[bytes] = []

        def wait() -> None:
            while not taken:  # it is woken by a new line, too
                taken.extend(inbox.take(MOST, None))

        waiting = threading.Thread(target=wait)
        waiting.start()
        inbox.read(near, bytes, nothing)
        time.sleep(0.05)
        assert waiting.is_alive()
        if by_line:
            far.send(b"come")
        else:
            inbox.put(b"come")
        waiting.join(5)
        assert taken == [b"come"]


def test_nobody_waits_longer_than_he_has_patience_or_while_there_is_something() -> None:
    inbox: Inbox[bytes] = Inbox()
    with pair() as (near, _):
        inbox.read(near, bytes, nothing)
        began = time.monotonic()
        while time.monotonic() < began + 0.1:
            assert inbox.take(MOST, 0.1) == []
        inbox.put(b"there")
        began = time.monotonic()
        assert inbox.take(MOST, 60) == [b"there"]
        assert time.monotonic() < began + 5


def test_no_more_is_taken_than_is_asked_for_and_lines_come_first() -> None:
    inbox: Inbox[bytes] = Inbox()
    with pair() as (near, far):
        inbox.read(near, bytes, nothing)
        far.send(b"by line")
        for number in range(5):
            inbox.put(bytes([number]))
        assert inbox.take(2, 0) == [b"by line", b"\0"]
        assert inbox.take(2, 0) == [b"\1", b"\2"]
        assert inbox.take(MOST, 0) == [b"\3", b"\4"]


@pytest.mark.parametrize("end", ["near", "far"])
def test_a_line_that_is_closed_at_either_end_is_read_to_its_end_and_no_more(end: str) -> None:
    inbox: Inbox[bytes] = Inbox()
    ended = threading.Event()
    with pair() as (near, far), pair() as (other, far_other):
        inbox.read(near, bytes, ended.set)
        inbox.read(other, bytes, nothing)
        inbox.take(MOST, 0)
        far.send(b"last")
        (near if end == "near" else far).close()
        taken = []
        while not ended.is_set():
            taken += inbox.take(MOST, 5)
        assert taken == [b"last"]
        assert near.fileno() == -1, "its descriptor is free"
        far_other.send(b"others go on")
        assert inbox.take(MOST, 5) == [b"others go on"]


def test_whoever_puts_never_waits_for_a_thread_that_takes_nothing() -> None:
    """Not even where it has been told to wake more often than its socket can hold."""
    inbox: Inbox[int] = Inbox()
    inbox._asleep = True
    for number in range(100_000):
        inbox.put(number)
    assert len(inbox) == 100_000
    assert inbox.take(MOST, 0) == list(range(MOST))
