"""File descriptors: each connection takes one, and when none is left, no file or connection can be opened.

So connections get what the process' limit leaves beside the gateway's own needs. Connections beyond that are closed as
they are accepted: otherwise asyncio would log a traceback for each failed accept, thousands a second.
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
# Most connections closed in one call of accept: then the event loop goes on.
_MOST_REFUSED = 256
# Connections accepted in one turn of the event loop.
ACCEPTED_AT_ONCE = 16
# Connections that may wait in the kernel until they are accepted: asyncio has only those wait that it accepts at once.
WAITING = 2048

log = structlog.get_logger("gateway")


def raise_limit() -> int:
    """Raise this process' limit of open files as far as allowed, and return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the system's own bound may be below the limit it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def room_within(limit: int, most: int) -> tuple[int, int]:
    """Return for how many connections, at most `most`, there is room, and the largest descriptor that one may have.

    `limit`: the number of files that this process may open.
    """
    return max(1, min(most, limit - _OWN - _ARRIVING)), max(limit // 2, limit - _OWN // 2) - 1


class Listener(socket.socket):
    """A listening socket, taken over from a bound one, that closes connections when descriptors run short.

    The kernel assigns the lowest free number, so a connection's descriptor tells how many files are open.
    """

    def __init__(self, bound: socket.socket, largest: int):
        super().__init__(fileno=bound.detach())
        self._largest = largest
        # Accepted connections that are not HTTP connections yet (TLS handshake), by descriptor, the oldest first.
        self._unmet: dict[int, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, object]:
        """Accept a connection with a descriptor of at most `largest`.

        Other connections are closed, each with the oldest connection that has not finished its TLS handshake. Raises
        BlockingIOError if no connection waits, or after _MOST_REFUSED closed ones.
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
        """Forget the connection with this descriptor: HTTP handles the connection now, and closes it."""
        self._unmet.pop(number, None)

    def _end_an_unmet(self) -> None:
        while self._unmet:
            number = next(iter(self._unmet))
            unmet = self._unmet.pop(number)
            if unmet.fileno() == number:  # otherwise already closed
                with contextlib.suppress(OSError):
                    unmet.shutdown(socket.SHUT_RDWR)
                return
