"""Telling the verifier which sequences have ended, in batches and in the background, until it has heard of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from gateway.peers import VerifierPeer
from gateway.scheduler import Scheduler
from spire.rpc.limits import MAX_NAMED

_RETRY_SECONDS = 0.25
# At the end nobody waits for a step: a verifier frees what is a lost gateway's by itself.
_LAST_SECONDS = 5.0

log = structlog.get_logger("gateway")


class Releases:
    """Wire ids whose place at the verifier is still to be freed, which happens between two steps: within `deadline`
    seconds, as a round. `settled` is called when that has been done."""

    def __init__(self, verifier: VerifierPeer, scheduler: Scheduler, deadline: float, settled: Callable[[], None]):
        self._verifier, self._scheduler, self._deadline = verifier, scheduler, deadline
        self._settled = settled
        self._pending: list[str] = []
        self._sending = False
        self._something = asyncio.Event()

    @property
    def under_way(self) -> bool:
        """Whether the verifier has still to hear of any: there is soon more room than it knows of."""
        return self._sending or bool(self._pending) or self._something.is_set()

    def wake(self) -> None:
        """The scheduler has let go of something."""
        self._something.set()

    def add(self, wire_id: str) -> None:
        """Free a place that the scheduler knows nothing of."""
        self._pending.append(wire_id)
        self.wake()

    def forget(self) -> None:
        """Another verifier process: it holds nothing of what was pending."""
        self._pending.clear()

    async def run(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            self._sending = True
            sent = await self._send(self._deadline)
            self._sending = False
            if sent:
                self._settled()
            else:
                await asyncio.sleep(_RETRY_SECONDS)
                self.wake()

    async def send_last(self) -> None:
        """Free what has ended by now, if that is soon done."""
        await self._send(_LAST_SECONDS)

    async def _send(self, seconds: float) -> bool:
        """Free at the verifier what has ended; what cannot be told now stays for the next time."""
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
        return True
