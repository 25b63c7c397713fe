"""A TCP proxy on loopback that breaks what it forwards: latency, black hole, half-open, reset, corruption, partition.

Faults are switched while it runs, from any thread. It has an event loop and a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum


class Way(Enum):
    """Which of a connection's bytes."""

    ASKED = "to the service"
    ANSWERED = "from the service"


@dataclass(eq=False)
class Link:
    """One forwarded connection. What travels a swallowed way is lost, and the other end hears nothing of it."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    swallowed: set[Way] = field(default_factory=set)
    corrupt: bool = False


class Proxy:
    """Forwards 127.0.0.1:port to `target` (HOST:PORT)."""

    def __init__(self, target: str):
        self.target = target
        # Seconds by which every byte is late, each way.
        self.latency = 0.0
        # Chunks of bytes that arrived with a wrong bit.
        self.flipped = 0
        self._links: set[Link] = set()
        self._swallow_new = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True).start()
        self._server = self._do(lambda: asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    # -- faults, from any thread -------------------------------------------------------------------------------------

    def hold(self) -> None:
        """A partition that heals: nothing arrives, nothing is lost."""
        self._call(self._flowing.clear)

    def black_hole(self) -> None:
        """A partition for good: everything is lost, new connections are taken and never answered."""
        self._swallow_new = True
        self.half_open()

    def half_open(self, *ways: Way) -> None:
        """The open connections lose everything (of these ways), and nobody is told. New ones work."""
        self._call(lambda: [link.swallowed.update(ways or Way) for link in self._links])

    def corrupt(self) -> None:
        """One bit of the next bytes of every open connection is wrong, each way."""
        self._call(lambda: [setattr(link, "corrupt", True) for link in self._links])

    def reset(self) -> None:
        """End the open connections with RST."""
        self._call(lambda: [_reset(link) for link in self._links])

    def heal(self) -> None:
        """As if there were no faults from now on. Connections that have lost bytes are reset: they cannot go on."""
        self.latency, self._swallow_new = 0.0, False
        self._call(self._flowing.set)
        self._call(lambda: [_reset(link) for link in self._links if link.swallowed])

    def close(self) -> None:
        self._call(self._server.close)
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], object]) -> None:
        async def called() -> None:
            function()

        self._do(called)

    def _do(self, make: Callable[[], object]) -> object:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(10)  # type: ignore[arg-type]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        host, port = self.target.rsplit(":", 1)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        link = Link(writer, far_writer, set(Way) if self._swallow_new else set())
        self._links.add(link)
        ways = [(reader, far_writer, Way.ASKED), (far_reader, writer, Way.ANSWERED)]
        pumps = [asyncio.create_task(self._pump(link, *way)) for way in ways]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._links.discard(link)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in (writer, far_writer):
            end.close()

    async def _pump(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        with contextlib.suppress(ConnectionError):
            async for arrived, chunk in _arrivals(reader):
                await asyncio.sleep(max(0.0, arrived + self.latency - time.monotonic()))
                await self._flowing.wait()
                if way not in link.swallowed:
                    self.flipped += link.corrupt
                    writer.write(_flip(chunk) if link.corrupt else chunk)
                    link.corrupt = False
                    await writer.drain()


async def _arrivals(reader: asyncio.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
    """What comes, with the time at which it came: late bytes do not delay those behind them."""
    arrived: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = await reader.read(65536)
            except ConnectionError:
                chunk = b""
            arrived.put_nowait((time.monotonic(), chunk))

    reading = asyncio.create_task(read())
    try:
        while (come := await arrived.get())[1]:
            yield come
    finally:
        reading.cancel()


def _flip(chunk: bytes) -> bytes:
    middle = len(chunk) // 2
    return chunk[:middle] + bytes([chunk[middle] ^ 0x10]) + chunk[middle + 1 :]


def _reset(link: Link) -> None:
    for end in (link.near, link.far):
        with contextlib.suppress(OSError):  # it may have ended by itself
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.transport.abort()


@contextlib.contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
