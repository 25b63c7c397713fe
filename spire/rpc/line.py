"""The shortest way between threads of two processes of one host: a Unix socket that they write and read themselves.

gRPC is the way that always works. What is small and due at once goes by the line where there is one, and by gRPC where
the line is not open, is full or has broken: nobody waits for it, and nothing is lost with it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import structlog

from spire.errors import InvalidRequest
from spire.rpc.host import own_directory
from spire.v1 import verifier_pb2 as pb

_NAMES = "spire-*.line"
_TOKEN_BYTES = 16
# Of a packet: the socket's buffer holds some of them.
_MOST_BYTES = 64 * 1024
# Whoever connects says at once who it is.
_PATIENCE_SECONDS = 1.0
# Whoever is offered a line opens it at once, or cannot.
_OFFERED_SECONDS = 5.0

log = structlog.get_logger()


class Line:
    """One end of a line. `send` may be called by several threads, `receive` by one."""

    def __init__(self, connected: socket.socket):
        self._socket = connected
        weakref.finalize(self, connected.close)

    def send(self, packet: bytes) -> bool:
        """Send it whole and at once, or not at all: then False."""
        if not packet or len(packet) > _MOST_BYTES:
            return False
        try:
            return self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(packet)
        except OSError:
            return False

    def receive(self) -> bytes:
        """Wait for the next packet; nothing once either end is closed."""
        with contextlib.suppress(OSError):
            return self._socket.recv(_MOST_BYTES)
        return b""

    def fileno(self) -> int:
        """Ready to be read when there is something to receive."""
        return self._socket.fileno()

    def close(self) -> None:
        """End it. Another thread may be reading: it has read the last packet, and is the one that frees the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def free(self) -> None:
        """When nobody waits for it any more: its number may become another file's."""
        self._socket.close()


class LineListener:
    """The end that is offered in a directory that both see. Raises OSError where no socket can be made there."""

    def __init__(self, directory: Path):
        directory = own_directory(directory)
        _remove_abandoned(directory)
        self.offer = pb.Ring(name=_NAMES.replace("*", secrets.token_hex(16)), token=secrets.token_bytes(_TOKEN_BYTES))
        file = directory / self.offer.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(str(file))
            file.chmod(0o600)
            self._socket.listen(1)
            self._socket.settimeout(_OFFERED_SECONDS)
        except OSError:
            self._socket.close()
            raise
        self._remove = weakref.finalize(self, file.unlink, missing_ok=True)

    def accept(self) -> Line | None:
        """Wait for whoever has the token; None when nobody comes for some seconds, or it is closed before."""
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._socket.accept()
                if _introduced(connected, self.offer.token):
                    return Line(connected)
                connected.close()
        return None

    def when_opened(self, take: Callable[[Line], None]) -> None:
        """Wait on a thread of its own for whoever has the token, and call `take` there with the line."""

        def wait() -> None:
            if line := self.accept():
                take(line)
            self.close()

        threading.Thread(target=wait, name="line", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._remove()


def offer_line(directory: str) -> LineListener | None:
    """What to offer a peer that sees this directory; None where there is none or nothing can be made in it."""
    try:
        return LineListener(Path(directory)) if directory else None
    except OSError as error:
        log.warning("no line", directory=directory, error=str(error))
        return None


def _introduced(connected: socket.socket, token: bytes) -> bool:
    connected.settimeout(_PATIENCE_SECONDS)
    try:
        return secrets.compare_digest(connected.recv(len(token)), token)
    except OSError:
        return False
    finally:
        connected.settimeout(None)


def open_line(directory: Path, offer: pb.Ring) -> Line:
    """The end that connects. Raises OSError when nobody listens, InvalidRequest for what is no file's name."""
    if Path(offer.name).name != offer.name:
        raise InvalidRequest(f"a line's name is a file name, {offer.name!r} is none")
    file = own_directory(directory) / offer.name
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.connect(str(file))
        connected.send(offer.token)
        file.unlink(missing_ok=True)
    except OSError:
        connected.close()
        raise
    return Line(connected)


def _remove_abandoned(directory: Path) -> None:
    """Remove the names that nobody listens behind any more."""
    for file in directory.glob(_NAMES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            try:
                asking.connect(str(file))
            except ConnectionRefusedError:
                file.unlink(missing_ok=True)
            except OSError:
                pass
