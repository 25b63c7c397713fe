"""Which clients go by the environment's proxies: a proxy here is a server that notes who comes to it."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from typer.testing import CliRunner

from spire.bench.client import BenchError, Client, Request
from spire.bench.exchange import Exchange, connect
from spire.cli import app
from spire.cli.doctor import _gateway
from spire.cli.gateway_client import ClientCompletion, run_completion, stream_chat
from spire.errors import SpireError
from spire.http import GatewayError, client_for, direct_client, goes_by_proxy
from spire.service.certificates import make_certificates


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A proxy for everything that answers by itself, and the first lines of what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(65536).split(b"\r\n")[0])
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = Thread(target=answer)
        thread.start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_another_machine_is_reached_by_the_proxy_of_the_environment(proxy: list[bytes]) -> None:
    with client_for("http://gateway.example:8000") as client:
        assert client.get("http://gateway.example:8000/ready").is_success
    assert proxy == [b"GET http://gateway.example:8000/ready HTTP/1.1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])
def test_this_machine_is_never_reached_by_a_proxy(host: str, proxy: list[bytes]) -> None:
    with client_for(f"http://{host}:9") as client, pytest.raises(httpx.ConnectError):
        client.get(f"http://{host}:9/ready")
    assert proxy == []


def test_our_own_processes_are_never_reached_through_a_proxy(proxy: list[bytes]) -> None:
    with direct_client() as client, pytest.raises(httpx.ConnectError):
        client.get("http://gateway.invalid:8000/ready")
    assert proxy == []


def test_no_proxy_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert goes_by_proxy("https://gateway.example")
    assert not goes_by_proxy("http://gateway.example")
    monkeypatch.setenv("no_proxy", "gateway.example")
    assert not goes_by_proxy("https://gateway.example")


@pytest.mark.parametrize("value", ["socks5://127.0.0.1:1080", "ftp://127.0.0.1:21"])
def test_a_proxy_that_cannot_be_used_is_one_line_that_names_the_variable(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    with pytest.raises(SpireError, match=r"the environment's proxies \(ALL_PROXY\) cannot be used: ") as refusal:
        client_for("http://gateway.example:8000")
    assert "\n" not in str(refusal.value)
    assert client_for("http://127.0.0.1:8000")


def test_certificates_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(SpireError, match="the trusted certificates of SSL_CERT_FILE cannot be read"):
        direct_client()


@pytest.fixture
def distrusted(tmp_path: Path) -> Iterator[str]:
    """The URL of an HTTPS server whose certificate is of an authority that nobody trusts."""
    make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "gateway" / "tls.crt", tmp_path / "gateway" / "tls.key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    with _running(server):
        yield f"https://127.0.0.1:{server.server_port}"


@contextmanager
def _running(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_certificate_that_is_not_trusted_is_told_as_such(distrusted: str) -> None:
    told = rf"does not trust the certificate of {distrusted} .*CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE must name"
    with client_for(distrusted) as client, pytest.raises(GatewayError, match=told):
        run_completion(client, distrusted, "Once")
    (check,) = _gateway(distrusted)
    assert re.search(told, check.advice)
    with pytest.raises(BenchError, match=told):
        asyncio.run(_ask(distrusted))
    with pytest.raises(BenchError, match=told):
        asyncio.run(connect(distrusted, Exchange))


def test_a_server_without_tls_is_not_told_as_absent(proxy: list[bytes]) -> None:
    url = f"https://{os.environ['http_proxy'].removeprefix('http://')}"
    with client_for(url) as client, pytest.raises(GatewayError, match=r"connection to .* failed: .*SSL"):
        run_completion(client, url, "Once")


@pytest.mark.parametrize(("prompt", "temperature"), [("Once", float("nan")), ("\udcff", 1.0)])
def test_a_request_that_cannot_be_sent_is_told_as_such(prompt: str, temperature: float) -> None:
    url = "http://127.0.0.1:9"
    with client_for(url) as client, pytest.raises(GatewayError, match="is asked for, or what it answers, is no JSON"):
        run_completion(client, url, prompt, temperature=temperature)


class _Page(BaseHTTPRequestHandler):
    """Something else than a gateway: every request is answered with a page."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html>It works!</html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The URL of a server that is no gateway."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    with _running(server):
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_server_that_is_no_gateway_is_told_as_such(elsewhere: str, tmp_path: Path) -> None:
    told = rf"{elsewhere}/v1/\S+ answers without a completion \(text/html\): is a gateway of Spire there\?"
    with client_for(elsewhere) as client:
        with pytest.raises(GatewayError, match=told):
            run_completion(client, elsewhere, "Once")
        with pytest.raises(GatewayError, match=told):
            list(stream_chat(client, elsewhere, ClientCompletion("Once")))
    with pytest.raises(GatewayError, match=told):
        asyncio.run(_ask(elsewhere))
    (tmp_path / "prompts.txt").write_text("Once")
    done = CliRunner().invoke(
        app, ["write", "--prompts", str(tmp_path / "prompts.txt"), "--url", elsewhere, "--out", str(tmp_path / "out")]
    )
    assert isinstance(done.exception, GatewayError), done.output
    assert re.search(told, str(done.exception))


async def _ask(url: str) -> None:
    async with Client(url, 1) as client:
        await client.complete_all(Request(1), [[1]])


@pytest.mark.parametrize("url", ["http://[::1", "http://::1:8000", "http://h:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SpireError, match="is no URL"):
        client_for(url)


def test_a_direct_client_that_cannot_be_made_says_nothing_of_proxies() -> None:
    with pytest.raises(SpireError, match=r"^this HTTP client cannot be made: .*port") as refusal:
        direct_client(base_url="http://h:port")
    assert "proxies" not in str(refusal.value)
    with pytest.raises(SpireError, match=r"^this HTTP client cannot be made: .*ascii"):
        direct_client(headers={"authorization": "Bearer \u20ac"})
