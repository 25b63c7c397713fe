"""Names of gateways and drafts, and the leases of gateways. Runs on the event loop.

A name in use belongs to the process that took it. Every process sends a secret random id, so a name read in a log is of
no use to others. A lease determines a gateway's valid stream, and when the sequences of a lost gateway are freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import structlog

from spire.errors import InvalidRequest, NotAllowed, SpireError, StaleBlock
from spire.rpc.channel import CALLER_METADATA_KEY
from verifier_service.engine.engine import VerifierEngine

log = structlog.get_logger("verifier_service")

End = Callable[[SpireError], None]


def told(context: grpc.aio.ServicerContext, key: str) -> str:
    """Return the value of this key in a call's metadata; empty if there is none."""
    return str(dict(context.invocation_metadata() or ()).get(key, ""))


class Names:
    """The names in use by one kind of process. `kind` is "gateway" or "draft", for error messages."""

    def __init__(self, kind: str):
        self._kind = kind
        # By name: the process that took it, and its number of uses.
        self._uses: dict[str, tuple[str, int]] = {}

    @contextmanager
    def held(self, name: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Use a name for the calling process inside the `with` block. Raises NotAllowed if another process uses it."""
        self.take(name, context)
        try:
            yield
        finally:
            self.leave(name)

    def take(self, name: str, context: grpc.aio.ServicerContext) -> None:
        self.check(name, context)
        caller, uses = self._uses.get(name, (told(context, CALLER_METADATA_KEY), 0))
        self._uses[name] = caller, uses + 1

    def leave(self, name: str) -> None:
        caller, uses = self._uses.pop(name)
        if uses > 1:
            self._uses[name] = caller, uses - 1

    def check(self, name: str, context: grpc.aio.ServicerContext) -> None:
        """Raise NotAllowed if a process other than the caller uses this name, InvalidRequest if the name is empty."""
        if not name:
            raise InvalidRequest(f"the {self._kind} does not say its name (a gateway: spire-gateway in the metadata)")
        if name in self._uses and self._uses[name][0] != told(context, CALLER_METADATA_KEY):
            raise NotAllowed(f"another process is {self._kind} {name} now: a name in use cannot be taken over")


@dataclass
class _Lease:
    newest: int = 0
    # The open streams: (number, function that ends the stream).
    streams: list[tuple[int, End]] = field(default_factory=list)
    expiry: asyncio.TimerHandle | None = None


class Leases:
    """The leases of gateways. A gateway numbers its streams, and only the newest is valid: messages delayed on an older
    stream would start sequences that nobody releases. A gateway loses its sequences and its name once its last stream
    has been closed for `seconds`."""

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
        """Keep a lease inside the `with` block, and end the gateway's older streams. Raises StaleBlock if a newer
        stream has been opened, NotAllowed if another process has this name."""
        if gateway not in self._leases:
            self.names.take(gateway, context)
            self._leases[gateway] = _Lease()
        self.names.check(gateway, context)
        lease = self._leases[gateway]
        if number < lease.newest:
            raise StaleBlock(f"stream {number} of this gateway came after stream {lease.newest}: it is over")
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

    def _expire(self, gateway: str) -> None:
        del self._leases[gateway]
        self.names.leave(gateway)
        log.info("a gateway stayed away: its sequences are freed", gateway=gateway)
        self._engine.call(self._engine.slots.release_gateway, gateway)
