"""The short way to a verifier on this host: a line by which batches go and their answers come, beside the stream.

What it does not know: what an answer is good for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from spire.errors import InvalidRequest
from spire.rpc.line import Line, open_line
from spire.v1 import verifier_pb2

log = structlog.get_logger("gateway")


class Shortcut:
    """`receive` takes what comes by it; `lost` is called when it breaks, and the stream with it."""

    def __init__(
        self, directory: str, receive: Callable[[verifier_pb2.RoundsResponse], None], lost: Callable[[], None]
    ):
        self._directory, self._receive, self._lost = Path(directory), receive, lost
        self.line: Line | None = None
        # Batches that went by the stream and are not answered: by the line another would overtake them.
        self._by_stream: set[int] = set()

    def open(self, offer: verifier_pb2.Ring) -> None:
        try:
            line = self.line = open_line(self._directory, offer)
        except (OSError, InvalidRequest) as error:
            log.info("no line to the verifier: all goes by gRPC", reason=str(error))
        else:
            asyncio.get_running_loop().add_reader(line.fileno(), self._hear, line)

    def close(self) -> None:
        if self.line:
            asyncio.get_running_loop().remove_reader(self.line.fileno())
            self.line.free()
        self.line = None

    def send(self, batch_id: int, request: verifier_pb2.RoundsRequest) -> bool:
        """Whether a batch went by it. If not it has to go by the stream."""
        if self.line and not self._by_stream and self.line.send(request.SerializeToString()):
            return True
        self._by_stream.add(batch_id)
        return False

    def forget(self, batch_id: int) -> None:
        """It is answered, or nobody waits for that any more."""
        self._by_stream.discard(batch_id)

    def _hear(self, line: Line) -> None:
        try:
            if packet := line.receive():
                self._receive(verifier_pb2.RoundsResponse.FromString(packet))
                return
        except DecodeError as error:
            log.warning("the verifier sent what cannot be read", error=str(error))
        self.close()
        self._lost()
