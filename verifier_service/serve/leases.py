"""Leases of gateways: which stream speaks for a gateway, and when a lost gateway is freed. Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import structlog

from spire.errors import SpireError, StaleBlock
from verifier_service.engine.engine import VerifierEngine
from verifier_service.serve.names import Names

log = structlog.get_logger("verifier_service")

End = Callable[[SpireError], None]


@dataclass
class _Lease:
    newest: int = 0
    # The open streams: (number, function that ends the stream).
    streams: list[tuple[int, End]] = field(default_factory=list)
    expiry: asyncio.TimerHandle | None = None


class Leases:
    """A gateway numbers its streams, and only the newest counts: messages that a partition delayed on an older stream
    would start sequences that nobody releases. A gateway loses its sequences and its name once its last stream has been
    closed for `seconds`."""

    def __init__(self, engine: VerifierEngine, seconds: float):
        self._engine, self._seconds = engine, seconds
        self.names = Names("gateway")
        self._leases: dict[str, _Lease] = {}

    @property
    def any_open(self) -> bool:
        """True if any gateway has an open stream."""
        return any(lease.streams for lease in self._leases.values())

    @contextmanager
    def held(self, gateway: str, context: grpc.aio.ServicerContext, number: int, end: End) -> Iterator[None]:
        """Hold the lease inside this block, and end the gateway's older streams. Raises StaleBlock if there has been a
        newer stream, NotAllowed if another process has this name."""
        lease = self._lease(gateway, context)
        _must_be_newest(number, lease.newest)
        lease.newest = number
        if lease.expiry:
            lease.expiry.cancel()
        for older, end_older in lease.streams:
            if older < number:
                end_older(StaleBlock(f"stream {older} of this gateway has ended: stream {number} speaks for it"))
        lease.streams.append((number, end))
        try:
            yield
        finally:
            lease.streams.remove((number, end))
            if not lease.streams:
                lease.expiry = asyncio.get_running_loop().call_later(self._seconds, self._expire, gateway)

    def _lease(self, gateway: str, context: grpc.aio.ServicerContext) -> _Lease:
        if gateway in self._leases:
            self.names.check(gateway, context)
        else:
            self.names.take(gateway, context)
            self._leases[gateway] = _Lease()
        return self._leases[gateway]

    def _expire(self, gateway: str) -> None:
        del self._leases[gateway]
        self.names.leave(gateway)
        log.info("a gateway stayed away: its sequences are freed", gateway=gateway)
        self._engine.call(self._engine.slots.release_gateway, gateway)


def _must_be_newest(number: int, newest: int) -> None:
    if number < newest:
        raise StaleBlock(f"stream {number} of this gateway came after stream {newest}: it is over")
