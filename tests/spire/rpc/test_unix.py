"""`unix:PATH`: a socket instead of a port, for services of one host."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import TypeAdapter, ValidationError

from spire.address import Host, by_tcp, join, split
from spire.errors import SpireError
from spire.rpc.channel import connect, listen, new_server
from spire.rpc.secret import Secret
from spire.rpc.tls import Tls
from spire.rpc.trust import Trust

HOST: TypeAdapter[str] = TypeAdapter(Host)


def serving(host: str, trust: Trust = Trust()) -> grpc.aio.Server:
    server = new_server(trust)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    listen(server, host, 0, trust)
    return server


async def answers(host: str) -> bool:
    async with connect(host) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        return bool(answer.status)


@pytest.mark.parametrize("path", ["", "relative.sock", "/" + "a" * 107, "/a,b.sock", "/a?b", "/a%20b", "/ä.sock"])
def test_a_path_that_no_socket_can_have_is_refused_with_the_reason(path: str) -> None:
    with pytest.raises(ValidationError, match="cannot be a socket: name an absolute path of at most 107 bytes"):
        HOST.validate_python(f"unix:{path}")


def test_a_path_is_no_host_with_a_port(tmp_path: Path) -> None:
    host = HOST.validate_python("unix:/run/spire/verifier.sock")
    assert join(host, 50051) == host
    assert split(host) == (host, 0)
    assert by_tcp(host) == "127.0.0.1"


async def test_a_service_is_reached_by_its_socket_and_by_nobody_else(tmp_path: Path) -> None:
    host = f"unix:{tmp_path}/v.sock"
    server = serving(host)
    await server.start()
    assert await answers(host)
    await server.stop(None)


async def test_a_second_service_leaves_the_socket_of_the_first_alone(tmp_path: Path) -> None:
    host = f"unix:{tmp_path}/v.sock"
    server = serving(host)
    await server.start()
    with pytest.raises(SpireError, match="another service listens there"):
        serving(host)
    assert await answers(host)
    await server.stop(None)


async def test_a_socket_that_a_killed_service_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "v.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = serving(f"unix:{path}")
    await server.start()
    assert await answers(f"unix:{path}")
    await server.stop(None)


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v.sock").write_text("mine")
    with pytest.raises(SpireError, match="no socket"):
        serving(f"unix:{tmp_path}/v.sock")
    assert (tmp_path / "v.sock").read_text() == "mine"


def test_a_directory_that_is_not_there_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(SpireError, match=f"there is no directory {tmp_path}/nowhere"):
        Trust().check_host(f"unix:{tmp_path}/nowhere/v.sock")


def test_tls_and_a_socket_do_not_go_together(tmp_path: Path) -> None:
    trust = Trust(Tls(b"", b"", b""), Secret("s" * 64))
    with pytest.raises(SpireError, match="do not go together"):
        trust.check_host(f"unix:{tmp_path}/v.sock")
