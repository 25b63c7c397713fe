"""An HTTP exchange that records each received piece with its time and parses the answer after the measurement.

The client shares the processor with the system under measurement, so HTTP is parsed when its cost no longer counts.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11

from spire.bench.client import BenchError
from spire.http import distrust, past_proxy


class HttpRefusal(BenchError):
    """Error for a request answered with a status other than 200, `seconds` after it was sent."""

    def __init__(self, message: str, status: int, seconds: float):
        super().__init__(message)
        self.status, self.seconds = status, seconds


class Exchange(asyncio.Protocol):
    """An HTTP connection for one request. `pieces` holds (time, bytes); times and `sent` are monotonic seconds."""

    def __init__(self) -> None:
        self.sent = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        self.sent = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    async def finish(self, silence: float) -> None:
        """Wait until the connection is closed. Raises TimeoutError after `silence` seconds without a received byte."""
        while not self.over.done():
            heard = self.pieces[-1][0] if self.pieces else self.sent
            left = heard + silence - time.monotonic()
            if left <= 0:
                raise TimeoutError
            await asyncio.wait([self.over], timeout=left)

    def close(self) -> None:
        self._transport.close()


_Exchange = TypeVar("_Exchange", bound=Exchange)


async def connect(url: str, exchange: Callable[[], _Exchange]) -> _Exchange:
    """Connect a new exchange, made by the factory `exchange`, to the server of `url`. Raises BenchError on failure."""
    remark, parts = past_proxy(url), urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    loop = asyncio.get_running_loop()
    try:
        _, connected = await loop.create_connection(exchange, parts.hostname or "", port, ssl=secure)
    except OSError as error:
        absent = f"{url} cannot be reached ({error}): start it with `spire up`{remark}"
        raise BenchError(distrust(url, error) or absent) from error
    return connected


def request_to(url: str, headers: dict[str, str], body: bytes | None = None) -> bytes:
    """Return an HTTP request, POST of the JSON `body` or GET, as bytes. It asks the server to close the connection."""
    parts = urlsplit(url)
    headers = {"Host": parts.netloc, "Connection": "close"} | headers
    if body is not None:
        headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    http = h11.Connection(h11.CLIENT)
    events: list[Any] = [
        h11.Request(method="GET" if body is None else "POST", target=target, headers=list(headers.items())),
        h11.Data(data=body or b""),
        h11.EndOfMessage(),
    ]
    return b"".join(http.send(event) or b"" for event in events)


def body_of(url: str, exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """Yield (time, bytes) of a response body's pieces. Raises HttpRefusal unless status 200, BenchError if cut off."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="POST", target="/", headers=[("Host", "-"), ("Connection", "close")]))
    http.send(h11.EndOfMessage())
    refused: h11.Response | None = None
    message = b""
    for moment, event in _events(url, http, exchange.pieces):
        if isinstance(event, h11.Response) and event.status_code != 200:
            refused = event
        elif isinstance(event, h11.Data) and refused:
            message += event.data
        elif isinstance(event, h11.Data):
            yield moment, bytes(event.data)
    if refused:
        said = message.decode(errors="replace")[:500]
        seconds = exchange.pieces[-1][0] - exchange.sent
        raise HttpRefusal(f"{url} answered {refused.status_code}: {said}", refused.status_code, seconds)


def _events(url: str, http: h11.Connection, pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, Any]]:
    try:
        for moment, data in [*pieces, (pieces[-1][0] if pieces else 0.0, b"")]:
            http.receive_data(data)
            while (event := http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                yield moment, event
                if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    return
    except h11.RemoteProtocolError as error:
        raise BenchError(f"{url} broke off in the middle of an answer: {error}") from error
