"""The line between two processes of one host: whole packets in order, or a no at once; and no name stays behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spire.errors import InvalidRequest
from spire.rpc import line
from spire.rpc.line import Line, LineListener, open_line
from spire.v1 import verifier_pb2 as pb


@contextmanager
def lines(directory: Path) -> Iterator[tuple[Line, Line]]:
    """The end that was offered and the one that opened it."""
    listener = LineListener(directory)
    accepted: list[Line | None] = []
    accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
    accepting.start()
    opened = open_line(directory, listener.offer)
    accepting.join(5)
    (offered,) = accepted
    assert offered is not None
    try:
        yield offered, opened
    finally:
        for end in (offered, opened, listener):
            end.close()


@settings(max_examples=50, deadline=None)
@given(packets=st.lists(st.binary(min_size=1, max_size=3000), max_size=20))
def test_packets_arrive_whole_and_in_order_both_ways(
    packets: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with lines(tmp_path_factory.mktemp("line")) as (offered, opened):
        for one, other in ((offered, opened), (opened, offered)):
            for packet in packets:
                assert one.send(packet)
                assert other.receive() == packet


def test_a_line_that_nobody_reads_says_no_at_once_and_loses_nothing_it_took(tmp_path: Path) -> None:
    with lines(tmp_path) as (offered, opened):
        sent = [number.to_bytes(4, "little") * 1000 for number in range(10_000)]
        taken = next(at for at, packet in enumerate(sent) if not offered.send(packet))
        assert taken > 3, "some rounds fit"
        assert [opened.receive() for _ in range(taken)] == sent[:taken]
        assert offered.send(b"again")
        assert opened.receive() == b"again"


def test_an_offer_that_nobody_takes_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "_OFFERED_SECONDS", 0.1)
    listener = line.offer_line(str(tmp_path))
    assert listener is not None
    taken: list[Line] = []
    listener.when_opened(taken.append)
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(OSError, match="No such file"):
        open_line(tmp_path, listener.offer)
    assert not taken


def test_where_nothing_can_be_made_no_line_is_offered(tmp_path: Path) -> None:
    assert line.offer_line("") is None
    assert line.offer_line(str(tmp_path / "missing")) is None


def test_what_is_too_large_for_a_packet_is_not_sent(tmp_path: Path) -> None:
    with lines(tmp_path) as (offered, opened):
        assert not offered.send(b"x" * 100_000)
        assert not offered.send(b""), "it would read as the end"
        assert offered.send(b"small")
        assert opened.receive() == b"small"


def test_closing_an_end_ends_the_other_and_whoever_reads_its_own(tmp_path: Path) -> None:
    with lines(tmp_path) as (offered, opened):
        reading = threading.Thread(target=offered.receive)
        reading.start()
        offered.close()
        reading.join(5)
        assert not reading.is_alive()
        assert opened.receive() == b""
        assert not opened.send(b"nobody is there")


def test_only_who_has_the_token_is_let_in(tmp_path: Path) -> None:
    listener = LineListener(tmp_path)
    accepted: list[Line | None] = []
    accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
    accepting.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, silent(listener, tmp_path):
        stranger.connect(str(tmp_path / listener.offer.name))
        stranger.send(b"0" * 16)
        assert stranger.recv(10) == b""
    line = open_line(tmp_path, listener.offer)
    accepting.join(5)
    (offered,) = accepted
    assert offered is not None
    assert line.send(b"let in")
    assert offered.receive() == b"let in"
    for end in (line, offered, listener):
        end.close()


@contextmanager
def silent(listener: LineListener, directory: Path) -> Iterator[None]:
    """Somebody who connects first and says nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nobody:
        nobody.connect(str(directory / listener.offer.name))
        yield


def test_a_listener_that_is_closed_waits_for_nobody(tmp_path: Path) -> None:
    listener = LineListener(tmp_path)
    accepted: list[Line | None] = []
    accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
    accepting.start()
    listener.close()
    accepting.join(5)
    assert accepted == [None]
    with pytest.raises(FileNotFoundError):
        open_line(tmp_path, listener.offer)


def test_a_listener_closed_before_anybody_waits_lets_nobody_wait(tmp_path: Path) -> None:
    listener = LineListener(tmp_path)
    listener.close()
    assert listener.accept() is None


def test_no_name_stays_behind(tmp_path: Path) -> None:
    """Of a line that is open, of a listener that has gone, and of a process that was killed."""
    with lines(tmp_path):
        assert not list(tmp_path.iterdir())
    listener = LineListener(tmp_path)
    listener.close()
    del listener
    assert not list(tmp_path.iterdir())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(tmp_path / "spire-killed.line"))
        killed.listen(1)
    living = LineListener(tmp_path)
    next_one = LineListener(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {living.offer.name, next_one.offer.name}
    for listener in (living, next_one):
        listener.close()


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="file name"):
        open_line(tmp_path, pb.Ring(name="../spire-0.line", token=b"0" * 16))
