"""One client's connection, with the two deadlines that uvicorn lacks: to say what is wanted, and to read the answer.

Who misses one is cut off: a connection and what is buffered for it are not held for ever.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.config import GatewayConfig

# What the kernel keeps of an answer that its reader does not take. Left alone it would let this grow to megabytes.
_SEND_BUFFER_BYTES = 256 * 1024


class Connection(H11Protocol):
    """A client has `head_deadline` seconds for a request's line and headers, and `reading_deadline` seconds to read
    some of what waits for it, once that is as much as is buffered. One of too many connections is cut off at once."""

    def __init__(self, limits: GatewayConfig, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._expect_head()

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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self._limits.reading_deadline, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._head)
        _cancel(self._reading)

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self._limits.head_deadline, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
