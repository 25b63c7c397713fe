"""Clients' connections, with the two deadlines that uvicorn lacks: to say what is wanted, and to read the answer.

Who misses one is cut off: a connection and what is buffered for it are not held for ever. So is whoever has asked for
nothing for longest, where there are too many.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.config import GatewayConfig

# What the kernel keeps of an answer that its reader does not take. Left alone it would let this grow to megabytes.
_SEND_BUFFER_BYTES = 256 * 1024


log = structlog.get_logger("gateway")


class Connections:
    """All that are open. Beyond `most` the one that has been idle for longest makes room for the newest. `met` is told
    the descriptor of each."""

    def __init__(self, most: int, met: Callable[[int], None]):
        self._most, self.met = most, met
        self._open: set[Connection] = set()
        # Between two requests, the longest idle first.
        self._idle: dict[Connection, None] = {}

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self._most:
            log.warning("too many connections: the longest idle is closed", most=self._most)
            next(iter(self._idle)).cut()

    def settled(self, connection: Connection, idle: bool) -> None:
        """It is between two requests, or no more."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle.setdefault(connection)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


class Connection(H11Protocol):
    """A client has `head_deadline` seconds for a request's line and headers, and `reading_deadline` seconds to read
    some of what waits for it, once that is as much as is buffered."""

    def __init__(self, limits: GatewayConfig, every: Connections, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._limits, self._all = limits, every
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._expect_head()
        self._all.met(transport.get_extra_info("socket").fileno())
        self._all.opened(self)

    def cut(self) -> None:
        """End it without a word. It counts no more, though its descriptor is closed a moment later."""
        self._all.closed(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Between two requests nothing is expected: uvicorn closes what stays idle for `idle_seconds`. A head that has
        begun must end."""
        if self._head is None and self.conn.their_state in (h11.IDLE, h11.DONE):
            self._expect_head()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            _cancel(self._head)
            self._head = None
        self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def _settle(self) -> None:
        self._all.settled(self, idle=self.cycle is None or self.cycle.response_complete)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self._limits.reading_deadline, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.closed(self)
        _cancel(self._head)
        _cancel(self._reading)

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self._limits.head_deadline, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
