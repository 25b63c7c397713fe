"""File descriptors: a connection is one, and when none is left nothing can be opened, accepted or even read again.

So connections get what is left of the process' limit behind what the gateway itself needs. What arrives beyond that is
closed as it is accepted: left alone, asyncio would log a traceback for each of its tries, thousands a second.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from dataclasses import dataclass

import structlog

# For the gateway itself: peers, lines, files of keys, what libraries open.
_OWN = 64
# Accepted, and not yet looked at.
_ARRIVING = 32
# So many are closed in one go: then others have their turn.
_MOST_REFUSED = 256
# Accepted in one turn of the event loop.
ACCEPTED_AT_ONCE = 16
# In the kernel, until they are accepted.
_WAITING = 2048

log = structlog.get_logger("gateway")


def raise_limit() -> int:
    """Let this process open as many files as it may, and return how many that are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system may set its own bound below what it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Room:
    """How many connections there are room for, and the largest descriptor that one may be."""

    connections: int
    largest: int

    @classmethod
    def within(cls, limit: int, most: int) -> Room:
        """For at most so many connections of a process that may open `limit` files."""
        return cls(max(1, min(most, limit - _OWN - _ARRIVING)), max(limit // 2, limit - _OWN // 2) - 1)


class Listener(socket.socket):
    """Takes over a bound socket. Since the kernel gives the lowest free number, a connection's own tells how many files
    are open."""

    def __init__(self, bound: socket.socket, largest: int):
        super().__init__(fileno=bound.detach())
        self._largest = largest
        # By number, the first accepted first: those of which a TLS handshake is still to come.
        self._unmet: dict[int, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, object]:
        """As a socket does, but for connections that there is no descriptor for: those are closed, and with each the
        one that has said nothing for longest."""
        for _ in range(_MOST_REFUSED):
            connection, address = super().accept()
            if (number := connection.fileno()) <= self._largest:
                self.met(number)
                self._unmet[number] = connection
                return connection, address
            connection.close()
            self._end_an_unmet()
            log.warning("no descriptor is left for a connection: it is closed", most=self._largest)
        raise BlockingIOError

    def met(self, number: int) -> None:
        """The connection of this number has become one of HTTP: it is others' to close."""
        self._unmet.pop(number, None)

    def _end_an_unmet(self) -> None:
        while self._unmet:
            number = next(iter(self._unmet))
            unmet = self._unmet.pop(number)
            if unmet.fileno() == number:  # else it has been closed
                with contextlib.suppress(OSError):
                    unmet.shutdown(socket.SHUT_RDWR)
                return

    def have_waiting(self) -> None:
        """Let more wait in the kernel than are accepted at once. Call it when the event loop has begun to listen."""
        self.listen(_WAITING)
