"""Releases ended sequences at the verifier: in batches, in the background, repeated until each has succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from gateway.rounds.scheduler import Scheduler
from gateway.verifier_client import VerifierClient
from spire.rpc.limits import MAX_NAMED

_RETRY_SECONDS = 0.25
# Deadline of the last release. Shutdown does not wait longer: the verifier frees a lost gateway's sequences by itself.
_LAST_SECONDS = 5.0

log = structlog.get_logger("gateway")


class Releases:
    """Releases ended sequences at the verifier, in calls of at most `deadline` seconds; then calls `settled`."""

    def __init__(self, verifier: VerifierClient, scheduler: Scheduler, deadline: float, settled: Callable[[], None]):
        self._verifier, self._scheduler, self._deadline, self._settled = verifier, scheduler, deadline, settled
        self._pending: list[str] = []
        self._something = asyncio.Event()

    def wake(self) -> None:
        """Wake the background task that releases ended sequences."""
        self._something.set()

    def add(self, wire_id: str) -> None:
        """Release a sequence that only the verifier still knows, by its wire id."""
        self._pending.append(wire_id)
        self.wake()

    def forget(self) -> None:
        """Drop all pending releases, because a new verifier process holds none of these sequences."""
        self._scheduler.released(self._pending)
        self._pending.clear()

    async def run(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            if await self.send(self._deadline):
                self._settled()
            else:
                await asyncio.sleep(_RETRY_SECONDS)
                self.wake()

    async def send(self, seconds: float = _LAST_SECONDS) -> bool:
        """Release all ended sequences at the verifier. Return False if some releases failed and stay pending."""
        self._pending += self._scheduler.take_ended()
        while ids := self._pending[:MAX_NAMED]:
            if not self._verifier.up:
                return False
            self._pending = self._pending[MAX_NAMED:]
            try:
                await self._verifier.release(ids, seconds)
            except grpc.aio.AioRpcError as error:
                log.warning("release failed", sequences=len(ids), reason=error.details())
                self._pending = ids + self._pending
                return False
            self._scheduler.released(ids)
        return True
