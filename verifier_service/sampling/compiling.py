"""Compiles the grammars of Starts on other threads, so that other requests do not wait.

A grammar may take all the time that its limits allow. An asker that sends many grammars delays only its own, and a
grammar that is withdrawn before its turn is not compiled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from spire.errors import InvalidRequest, NotFinite, SpireError, UnknownSequence
from spire.service.fair_pool import FairPool
from spire.v1 import verifier_pb2 as pb
from verifier_service.sampling.grammar import Grammars, Matcher

log = structlog.get_logger("verifier_service")
# Two grammars are compiled at once, of different askers, who take turns: the other processors are needed for decoding.
_POOL = FairPool(2, "grammars")

Compiled = Callable[[pb.Start, Matcher], None]
Refused = Callable[[pb.Start, SpireError], None]


class Compiling:
    """The Starts of one stream whose grammars are being compiled. Each Start goes once to `compiled` or `refused`."""

    def __init__(self, grammars: Grammars, gateway: str, compiled: Compiled, refused: Refused):
        self._grammars, self._gateway = grammars, gateway
        self._compiled, self._refused = compiled, refused
        self._tasks: dict[asyncio.Task[None], pb.Start] = {}

    def begin(self, start: pb.Start) -> None:
        task = asyncio.create_task(self._compile(start))
        self._tasks[task] = start
        task.add_done_callback(self._tasks.pop)

    def withdraw(self, sequence_ids: Collection[str]) -> None:
        """Refuse the Starts of these sequences, which have been released."""
        for task, start in self._tasks.items():
            if start.sequence_id in sequence_ids and not task.cancelling():
                task.cancel()
                self._refused(start, UnknownSequence(f"sequence {start.sequence_id} has been released"))

    def end(self) -> None:
        """Cancel all Starts and answer none: the stream has ended, and a reconnecting gateway has released them."""
        for task in self._tasks:
            task.cancel()

    async def _compile(self, start: pb.Start) -> None:
        grammar = start.adjustments.grammar
        try:
            # A grammar that is cancelled before its turn is never compiled.
            matcher = await _POOL.run(f"{self._gateway} {grammar.asker}", self._grammars.compile, grammar)
        except asyncio.CancelledError:
            raise
        except InvalidRequest as error:
            self._refused(start, error)
        except BaseException as error:  # the library's panics are not Exceptions
            log.exception("a grammar could not be compiled")
            self._refused(start, NotFinite(f"the verifier could not compile the grammar: {error}"))
        else:
            self._compiled(start, matcher)
