"""However many connections are opened, the gateway keeps descriptors for itself, serves who asks, and logs little."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from gateway.http.connections import Connections
from gateway.http.descriptors import Listener, room_within
from spire.address import bind
from tests.gateway.conftest import eventually
from tests.services import Service, start

LIMIT = 256
IDLE = 400


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Alone, with a soft limit that is below the hard one."""
    options = ["--verifier", "127.0.0.1:9", "--startup-patience", "0", "--port", "0", "--head-deadline", "300"]
    command = ["-m", "tests.few_descriptors_gateway", "128", str(LIMIT), *options]
    service = start(command, tmp_path_factory.mktemp("gateway"))
    yield service
    service.stop()


def connection(gateway: Service) -> socket.socket:
    host, port = gateway.address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def open_files(gateway: Service) -> int:
    return len(list(Path(f"/proc/{gateway.process.pid}/fd").iterdir()))


def healthy(gateway: Service) -> bool:
    try:
        return httpx.get(f"http://{gateway.address}/health", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def test_it_may_open_as_many_files_as_the_system_lets_it(gateway: Service) -> None:
    (line,) = [text for text in Path(f"/proc/{gateway.process.pid}/limits").read_text().splitlines() if "files" in text]
    assert line.split()[3:5] == [str(LIMIT), str(LIMIT)]


@pytest.mark.fault(35)
def test_health_is_answered_with_more_idle_connections_than_descriptors(gateway: Service) -> None:
    before = open_files(gateway)
    with ExitStack() as stack:
        busy = stack.enter_context(connection(gateway))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        busy.sendall(head + b"Content-Length: 2\r\n\r\n{")
        for _ in range(IDLE):
            stack.enter_context(connection(gateway))
        answered = [healthy(gateway) for _ in range(20)]
        assert answered.count(False) <= 1, "one may have come before the first were closed"
        assert open_files(gateway) <= LIMIT - 32
        busy.sendall(b"}")
        assert busy.recv(64).startswith(b"HTTP/1.1 ")
    eventually(lambda: open_files(gateway) <= before + 2)
    log = gateway.log.read_text()
    assert "Traceback" not in log
    assert len(log) < 20_000
    assert "the longest idle is closed" in log


def test_who_asks_often_is_not_the_one_who_is_closed(gateway: Service) -> None:
    url, kept_by_client = f"http://{gateway.address}", httpx.Limits(keepalive_expiry=None)
    with ExitStack() as stack, httpx.Client(base_url=url, timeout=30, limits=kept_by_client) as asking:
        assert asking.get("/health").status_code == 200
        (kept,) = [connection.info() for connection in asking._transport._pool.connections]  # type: ignore[attr-defined]
        for _ in range(4):
            for _ in range(LIMIT // 4):
                stack.enter_context(connection(gateway))
            eventually(lambda: healthy(gateway))  # a later connection is served, so all before it are accepted
            assert asking.get("/health").status_code == 200
        (now,) = [connection.info() for connection in asking._transport._pool.connections]  # type: ignore[attr-defined]
        assert kept.split(",")[0] == now.split(",")[0]
        assert now.endswith("Request Count: 5")


class Idle:
    """A connection as far as its place among others goes."""

    def __init__(self, every: Connections):
        self.every, self.is_open = every, True

    def cut(self) -> None:
        self.is_open = False
        self.every.closed(self)  # type: ignore[arg-type]


def test_the_longest_idle_goes_first_and_who_is_served_stays() -> None:
    every = Connections(3, lambda _: None)
    first, second, third, fourth, fifth = ends = [Idle(every) for _ in range(5)]
    for end in (first, second, third):
        every.opened(end)  # type: ignore[arg-type]
    every.settled(first, idle=False)  # type: ignore[arg-type]
    every.settled(second, idle=False)  # type: ignore[arg-type]
    every.settled(second, idle=True)  # type: ignore[arg-type]
    every.opened(fourth)  # type: ignore[arg-type]
    assert [end.is_open for end in ends] == [True, True, False, True, True]
    every.opened(fifth)  # type: ignore[arg-type]
    assert [end.is_open for end in ends] == [True, False, False, True, True]


def test_a_newcomer_is_refused_where_all_others_are_served() -> None:
    every = Connections(1, lambda _: None)
    served, newcomer = Idle(every), Idle(every)
    every.opened(served)  # type: ignore[arg-type]
    every.settled(served, idle=False)  # type: ignore[arg-type]
    every.opened(newcomer)  # type: ignore[arg-type]
    assert (served.is_open, newcomer.is_open) == (True, False)


@pytest.mark.parametrize("limit", [16, 64, 128, 256, 1024, 1_048_576])
def test_there_is_room_for_a_connection_but_never_beyond_the_limit(limit: int) -> None:
    connections, largest = room_within(limit, 4096)
    assert 1 <= connections <= 4096
    assert connections < limit
    assert largest < limit


@pytest.mark.fault(35)
def test_a_connection_without_a_descriptor_is_closed_and_nothing_raised() -> None:
    with Listener(bind("127.0.0.1", 0), largest=0) as listener:
        listener.listen()
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname()) as refused:
            with pytest.raises(BlockingIOError):
                listener.accept()
            refused.settimeout(10)
            with suppress(ConnectionResetError):
                assert refused.recv(1) == b""


def test_who_never_begins_to_speak_makes_room_for_others() -> None:
    """As connections do that are accepted and never shake hands for TLS."""
    with ExitStack() as stack:
        bound = bind("127.0.0.1", 0)
        bound.listen(16)
        for _ in range(8):
            stack.enter_context(socket.create_connection(bound.getsockname()))
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            lowest_free = [first.fileno(), second.fileno(), third.fileno()]
        listener = stack.enter_context(Listener(bound, largest=max(lowest_free)))
        listener.setblocking(False)
        speaks, *_ = accepted = [stack.enter_context(listener.accept()[0]) for _ in range(3)]
        listener.met(speaks.fileno())
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert [is_shut(connection) for connection in accepted] == [False, True, True]


def is_shut(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"x")
    except BrokenPipeError:
        return True
    return False
