"""What a client sends is parsed little by little, and what one asker sends stays within a share of the memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from gateway.config import GatewayConfig
from gateway.http.connections import Connection, Connections
from gateway.http.front import Front
from gateway.http.keys import Guard
from gateway.metrics import Metrics
from tests.stretches import longest_stretch_of

# Of processor time.
LONGEST = 0.02
HEAD, LAST = b"GET / HTTP/1.1\r\nHost: a\r\n", b"Connection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKS = POST + b"Transfer-Encoding: chunked\r\n" + LAST + b"1\r\nx\r\n" * 60_000 + b"0\r\n\r\n"
HEADERS = HEAD + b"a:\r\n" * 3_000 + LAST
ENDLESS = HEAD + b"a:\r\n" * 60_000 + LAST
QUERY = HEAD.replace(b"/ ", b"/?" + b"a&" * 7_000 + b" ", 1) + LAST
PIPELINED = (HEAD + b"\r\n") * 1_999 + HEAD + LAST


async def size_of_body(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers how long the body was."""
    body = b"%d" % len(scope["state"].pop("body"))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def front(app: ASGIApp = size_of_body, most: int = 2 << 20) -> Front:
    return Front(app, Metrics(), Guard(None), frozenset(["/"]), most, body_deadline=30)


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """A server of this process; what is yielded sends bytes over a new connection, and returns all that came back."""
    config, every = uvicorn.Config(app, log_config=None), Connections(100, lambda _: None)
    config.load()
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(GatewayConfig(), every, config=config, server_state=ServerState(), app_state={}, _loop=loop)

    async def exchange(sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        came = b""
        with suppress(ConnectionResetError):  # by a server that refuses the rest
            while part := await asyncio.wait_for(reader.read(1 << 16), 60):
                came += part
        writer.close()
        return came

    async with await loop.create_server(connection, "127.0.0.1", 0) as server:
        yield exchange


@pytest.mark.parametrize(
    ("sent", "status"),
    [(CHUNKS, b"200"), (HEADERS, b"431"), (ENDLESS, b"400"), (QUERY, b"431"), (PIPELINED, b"200")],
    ids=["chunks", "headers", "endless headers", "query", "pipelined"],
)
async def test_whatever_is_sent_is_parsed_in_short_stretches(sent: bytes, status: bytes) -> None:
    async with served(front()) as exchange:
        longest, came = await longest_stretch_of(lambda: exchange(sent), LONGEST)
    assert came.startswith(b"HTTP/1.1 " + status) or (sent is ENDLESS and not came), came[:200]
    assert came.count(b"HTTP/1.1 200") == (2_000 if sent is PIPELINED else sent is CHUNKS)
    assert longest.seconds < LONGEST, longest


async def test_a_body_arrives_whole_however_it_is_cut() -> None:
    async with served(front()) as exchange:
        assert (await exchange(CHUNKS)).endswith(b"\r\n\r\n60000")
        came = await exchange(POST + b"Content-Length: 1000003\r\n" + LAST + b"x" * 1_000_003)
        assert came.endswith(b"\r\n\r\n1000003")


async def test_an_askers_bodies_together_are_bounded_until_its_requests_end() -> None:
    held, answers = asyncio.Event(), list[int]()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await held.wait()

    async def post(layer: Front, address: str) -> None:
        came: list[Message] = [{"type": "http.request", "body": b"x" * 10, "more_body": False}]

        async def body() -> Message:
            if not came:
                await asyncio.Event().wait()
            return came.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answers.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": (address, 1)}
        await layer(scope, body, send)

    layer = front(waits, most=10)
    fitting = [asyncio.create_task(post(layer, "one")) for _ in range(64)]
    await asyncio.sleep(0.01)
    await asyncio.wait_for(post(layer, "one"), 20)
    assert answers == [429]
    other = asyncio.create_task(post(layer, "other"))
    await asyncio.sleep(0.01)
    assert answers == [429], "another asker has a share of its own"
    held.set()
    await asyncio.gather(*fitting, other)
    await post(layer, "one")
    assert answers == [429], "what has ended holds nothing"


async def answer_before_the_body_ends(layer: Front, first: Message, **scope: object) -> int:
    """Return the status of the answer to a client that sends `first` and then neither anything more nor leaves."""
    answered, came, status = asyncio.Event(), [first], 0

    async def body() -> Message:
        if not came:
            await asyncio.Event().wait()
        return came.pop()

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        if message.get("body"):
            answered.set()

    head = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": ("one", 1)}
    request = asyncio.create_task(layer(head | scope, body, send))
    await asyncio.wait_for(answered.wait(), 20)
    request.cancel()
    return status


async def test_a_refusal_does_not_wait_for_the_rest_of_a_body() -> None:
    first = {"type": "http.request", "body": b"x" * 11, "more_body": True}
    headers = [(b"a", b"")] * 300
    assert await answer_before_the_body_ends(front(most=10), first) == 413
    assert await answer_before_the_body_ends(front(), first, headers=headers) == 431


async def test_a_client_that_still_sends_gets_its_refusal_and_no_reset() -> None:
    async with served(front(most=10)) as exchange:
        came = await exchange(POST + b"Content-Length: 9000000\r\n\r\n" + b"x" * 9_000_000)
    assert came.startswith(b"HTTP/1.1 413")
    assert came.endswith(b"}"), "whole"
