"""Limits on the file descriptors of connections: without a free one, no file or connection can be opened.

Connections may have the process' limit of open files less what the gateway itself needs. Excess connections are closed
as soon as they are accepted: otherwise asyncio would log a traceback for each failed accept, thousands a second.
"""

from __future__ import annotations

import contextlib
import resource
import socket

import structlog

# Descriptors for the gateway itself: connections to services, key files, files of libraries.
_OWN = 64
# Connections accepted and not yet handled.
_ARRIVING = 32
# Most connections that one call of `accept` closes before it returns to the event loop.
_MOST_REFUSED = 256
# Connections accepted in one turn of the event loop.
ACCEPTED_AT_ONCE = 16
# The listen backlog: connections that wait in the kernel to be accepted. asyncio's own is only ACCEPTED_AT_ONCE.
WAITING = 2048

log = structlog.get_logger("gateway")


def raise_limit() -> int:
    """Raise this process' limit of open files as far as allowed. Return the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the system's own bound may be below the limit it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def room_within(limit: int, most: int) -> tuple[int, int]:
    """Return (number of connections to allow, at most `most`; largest file descriptor that a connection may have).

    `limit`: the number of files that this process may open.
    """
    return max(1, min(most, limit - _OWN - _ARRIVING)), max(limit // 2, limit - _OWN // 2) - 1


class Listener(socket.socket):
    """A listening socket that closes new connections when file descriptors run short. Takes over the socket `bound`.

    The kernel assigns the lowest free number, so a connection's descriptor shows how many files are open.
    """

    def __init__(self, bound: socket.socket, largest: int):
        super().__init__(fileno=bound.detach())
        self._largest = largest
        # Accepted connections that are not HTTP connections yet (TLS handshake), by descriptor, the oldest first.
        self._unmet: dict[int, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, object]:
        """Accept and return the next connection whose file descriptor is small enough: at most `largest`.

        Other connections are closed, and with each the oldest connection that has not finished its TLS handshake.
        Raises BlockingIOError if no connection waits, or after _MOST_REFUSED closed ones.
        """
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
        """Stop tracking the connection with this file descriptor: the HTTP protocol now handles and closes it."""
        self._unmet.pop(number, None)

    def _end_an_unmet(self) -> None:
        while self._unmet:
            number = next(iter(self._unmet))
            unmet = self._unmet.pop(number)
            if unmet.fileno() == number:  # otherwise already closed
                with contextlib.suppress(OSError):
                    unmet.shutdown(socket.SHUT_RDWR)
                return
