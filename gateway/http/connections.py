"""HTTP connections with two timeouts that uvicorn lacks: for sending a request's head, and for reading the answer.

A connection that exceeds a timeout is aborted, so that neither the connection nor its buffers stay for ever. If there
are too many connections, the one that has been idle for longest is aborted. What a client sends is parsed little by
little, because a read of 256 KiB may contain 40,000 chunks of a body, which take a third of a second.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.config import GatewayConfig

# The kernel's buffer for an answer that the client does not read. By default the kernel lets it grow to megabytes.
_SEND_BUFFER_BYTES = 256 * 1024
_PARSED_AT_ONCE = 2048

log = structlog.get_logger("gateway")


class Connections:
    """All open connections; beyond `most`, aborts the longest idle. `met` is called with each one's file descriptor."""

    def __init__(self, most: int, met: Callable[[int], None]):
        self._most, self.met = most, met
        self._open: set[Connection] = set()
        # Connections between two requests, the longest idle first.
        self._idle: dict[Connection, None] = {}

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self._most:
            log.warning("too many connections: the longest idle is closed", most=self._most)
            next(iter(self._idle)).cut()

    def settled(self, connection: Connection, idle: bool) -> None:
        """Record whether the connection is idle, that is between two requests."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle.setdefault(connection)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


class Flow(FlowControl):
    """uvicorn's flow control, which also pauses reading while received bytes wait to be parsed."""

    def __init__(self, transport: asyncio.Transport):
        super().__init__(transport)
        self._full = self._unparsed = False

    def pause_reading(self) -> None:
        self._full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self._full = False
        self.parsed(not self._unparsed)

    def parsed(self, everything: bool) -> None:
        """Pause reading unless all received bytes are parsed and uvicorn has room for more."""
        self._unparsed = not everything
        if self._full or self._unparsed:
            super().pause_reading()
        else:
            super().resume_reading()


class Connection(H11Protocol):
    """An HTTP connection whose client must send a request's line and headers within `head_deadline` seconds.

    Once the write buffer is full, the client must drain it within `reading_deadline` seconds.
    """

    def __init__(self, limits: GatewayConfig, every: Connections, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._limits, self._all = limits, every
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()
        self._parsing: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = Flow(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._expect_head()
        self._all.met(transport.get_extra_info("socket").fileno())
        self._all.opened(self)

    def cut(self) -> None:
        """Abort the connection, which counts as closed at once. Its descriptor is closed a moment later."""
        self._all.closed(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self._parsing is None:
            self._parse()

    def _parse(self) -> None:
        """Parse the first unparsed bytes, and the next ones after other work of the event loop.

        Starts the head timeout at the first bytes of a later request; until then uvicorn's idle timeout applies.
        """
        if self._head is None and self.conn.their_state in (h11.IDLE, h11.DONE):
            self._expect_head()
        data = bytes(self._unparsed[:_PARSED_AT_ONCE])
        del self._unparsed[:_PARSED_AT_ONCE]
        super().data_received(data)
        more = bool(self._unparsed) and not self.transport.is_closing()
        self._parsing = self.loop.call_soon(self._parse) if more else None
        self._flow.parsed(not more)

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
        for pending in (self._head, self._reading, self._parsing):
            _cancel(pending)

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self._limits.head_deadline, self.transport.abort)


def _cancel(pending: asyncio.Handle | None) -> None:
    if pending is not None:
        pending.cancel()
