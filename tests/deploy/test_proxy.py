"""deploy/proxy/nginx.conf before an upstream that a test controls: what reaches the gateway, and what does not."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.deploy.compose import DEPLOY
from tests.gateway.conftest import eventually
from tests.services import Services
from tests.verifier_service.harness import free_port

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx: apt-get install nginx-light")

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: spire\r\n"


@dataclass
class Upstream:
    """Stands where the gateway would: notes the first bytes of each connection, then answers by `answer`."""

    port: int = 0
    seen: list[bytes] = field(default_factory=list)
    answer: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.append(await reader.read(65536))
        if self.answer:
            await self.answer(writer)
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    there = Upstream()
    async with await asyncio.start_server(there.serve, "127.0.0.1", 0) as server:
        there.port = server.sockets[0].getsockname()[1]
        yield there


@dataclass
class Proxy:
    process: subprocess.Popen[bytes]
    port: int
    directory: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def proxy(directory: Path, gateway: str) -> Iterator[Proxy]:
    """nginx with the configuration as it is, but for addresses and the place of its files."""
    port, text = free_port(), (DEPLOY / "proxy" / "nginx.conf").read_text()
    for ours, theirs in {
        "gateway:8000": gateway,
        "listen 8080": f"listen 127.0.0.1:{port}",
        "/tmp/": f"{directory}/",
    }.items():
        assert ours in text, ours
        text = text.replace(ours, theirs)
    file = directory / "nginx.conf"
    file.write_text(text)
    process = subprocess.Popen(["nginx", "-p", directory, "-c", file, "-g", "daemon off; user root;"])
    try:
        accepting(port)
        yield Proxy(process, port, directory)
    finally:
        process.terminate()
        process.wait(timeout=20)


@asynccontextmanager
async def before_upstream(directory: Path) -> AsyncIterator[tuple[Upstream, Proxy]]:
    async with upstream() as behind:
        with proxy(directory, f"127.0.0.1:{behind.port}") as front:
            yield behind, front


def accepting(port: int) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(answers, within=30)


async def said_to(port: int, *parts: bytes, pause: float = 0.0, patience: float = 30.0) -> bytes:
    """Send the parts, pausing between them, and return all that is answered until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    try:
        for part in parts:
            with suppress(OSError):
                writer.write(part)
                await writer.drain()
            await asyncio.wait([answer], timeout=pause)
            if answer.done():
                break
        async with asyncio.timeout(patience):
            with suppress(ConnectionResetError):
                return await answer
            return b""
    finally:
        writer.close()


@pytest.mark.thorough
async def test_a_head_that_drips_is_cut_off_and_never_reaches_the_gateway(tmp_path: Path) -> None:
    dripping = [HEAD, *[b"X-A: b\r\n"] * 60]
    async with before_upstream(tmp_path) as (behind, front):
        began = time.monotonic()
        answer = await said_to(front.port, *dripping, pause=1.0)
        assert time.monotonic() - began < 40
        assert b" 200 " not in answer
        assert behind.seen == []


@pytest.mark.thorough
async def test_a_body_that_stalls_is_cut_off_and_never_reaches_the_gateway(tmp_path: Path) -> None:
    async with before_upstream(tmp_path) as (behind, front):
        answer = await said_to(front.port, HEAD + b"Content-Length: 100\r\n\r\n", b"half of it", patience=40)
        assert b" 200 " not in answer
        assert behind.seen == []


async def test_without_the_proxy_a_half_head_does_arrive() -> None:
    """A control for the two tests above."""
    async with upstream() as behind:
        await said_to(behind.port, HEAD)
        assert behind.seen == [HEAD]


async def test_a_body_over_the_limit_is_refused_in_the_shape_of_the_api(tmp_path: Path) -> None:
    async with before_upstream(tmp_path) as (behind, front), httpx.AsyncClient() as client:
        answer = await client.post(f"{front.url}/v1/completions", content=b"x" * (2 * 1024 * 1024 + 1))
        assert answer.status_code == 413
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert behind.seen == []


async def test_headers_over_the_limit_are_refused(tmp_path: Path) -> None:
    async with before_upstream(tmp_path) as (behind, front), httpx.AsyncClient() as client:
        answer = await client.get(f"{front.url}/health", headers={"X-Long": "x" * 100_000})
        assert answer.status_code in (400, 431)
        assert behind.seen == []


def test_without_a_gateway_the_answer_says_to_come_back(tmp_path: Path) -> None:
    with proxy(tmp_path, f"127.0.0.1:{free_port()}") as front:
        answer = httpx.get(f"{front.url}/health")
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        assert answer.json()["error"]["code"] == "no_gateway"


async def test_a_request_arrives_as_it_was_sent_without_the_client_s_address(tmp_path: Path) -> None:
    async def answered(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Request-Id: mine\r\n\r\n{}")

    async with before_upstream(tmp_path) as (behind, front), httpx.AsyncClient() as client:
        behind.answer = answered
        headers = {"Authorization": "Bearer key", "X-Request-Id": "mine"}
        answer = await client.post(f"{front.url}/v1/completions?a=b", json={"prompt": "x"}, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        head, _, body = behind.seen[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions?a=b HTTP/1.1\r\n")
        assert b"authorization: bearer key" in head.lower()
        assert json.loads(body) == {"prompt": "x"}
        assert b"forwarded" not in head.lower()
        assert b"real-ip" not in head.lower()


async def test_a_token_is_forwarded_at_once_and_a_stream_survives_sigquit(tmp_path: Path) -> None:
    arrived = asyncio.Event()

    async def streamed(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: 1\n\n")
        await asyncio.wait_for(arrived.wait(), 30)
        writer.write(b"data: 2\n\n")

    async with before_upstream(tmp_path) as (behind, front):
        behind.answer = streamed
        async with httpx.AsyncClient(timeout=30) as client, client.stream("GET", f"{front.url}/v1") as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            front.process.send_signal(signal.SIGQUIT)
            await asyncio.sleep(1)
            arrived.set()
            assert await anext(chunks) == b"data: 2\n\n"


def test_a_completion_streams_through_it(system: Services, your_key: dict[str, str], tmp_path: Path) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "stream": True}
    with proxy(tmp_path, system.url.removeprefix("http://")) as front:
        texts = [ask(url, body, your_key) for url in (front.url, system.url)]
        assert [answer.status_code for answer in texts] == [200, 200]
        assert texts[0].text.rstrip().endswith("data: [DONE]")
        assert said(texts[0].text) == said(texts[1].text) != ""
        assert ask(front.url, body, {}).status_code == 401


def ask(url: str, body: dict[str, object], headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def said(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
