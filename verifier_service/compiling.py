"""Starts whose grammars are compiled first, beside the rounds: nobody else waits for that.

A grammar may take all that its limits allow. Whoever sends many waits for them alone, and those that nobody wants any
more are not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from spire.errors import InvalidRequest, NotFinite, SpireError, UnknownSequence
from spire.fair_pool import FairPool
from spire.v1 import verifier_pb2 as pb
from verifier_service.grammar import Grammars, Matcher

log = structlog.get_logger("verifier_service")
# Of different askers: the other processors are needed for decoding.
_AT_ONCE = 2

Compiled = Callable[[pb.Start, Matcher], None]
Refused = Callable[[pb.Start, SpireError], None]


class Compiler:
    """What compiles for all gateways. None of them can have it all to itself."""

    def __init__(self, grammars: Grammars):
        self._grammars = grammars
        self._pool = FairPool(_AT_ONCE, "grammars")

    async def compile(self, gateway: str, grammar: pb.Grammar) -> Matcher:
        """Raises InvalidRequest. Cancelled in time, it never begins."""
        return await self._pool.run(f"{gateway} {grammar.asker}", self._grammars.compile, grammar)


class Compiling:
    """The Starts of one gateway's stream that wait for their grammars. Each is told of once, or withdrawn."""

    def __init__(self, compiler: Compiler, gateway: str, compiled: Compiled, refused: Refused):
        self._compiler, self._gateway = compiler, gateway
        self._compiled, self._refused = compiled, refused
        self._tasks: dict[asyncio.Task[None], pb.Start] = {}

    def begin(self, start: pb.Start) -> None:
        task = asyncio.create_task(self._compile(start))
        self._tasks[task] = start
        task.add_done_callback(self._tasks.pop)

    def withdraw(self, sequence_ids: Collection[str]) -> None:
        """These have been released."""
        for task, start in self._tasks.items():
            if start.sequence_id in sequence_ids and not task.cancelling():
                task.cancel()
                self._refused(start, UnknownSequence(f"sequence {start.sequence_id} has been released"))

    def end(self) -> None:
        """The stream is over: a gateway that has come back has released what it asked for on this one, and would not
        hear of it."""
        for task in self._tasks:
            task.cancel()

    async def _compile(self, start: pb.Start) -> None:
        try:
            matcher = await self._compiler.compile(self._gateway, start.adjustments.grammar)
        except asyncio.CancelledError:
            raise
        except InvalidRequest as error:
            self._refused(start, error)
        except BaseException as error:  # the library's panics are no Exceptions
            log.exception("a grammar could not be compiled")
            self._refused(start, NotFinite(f"the verifier could not compile the grammar: {error}"))
        else:
            self._compiled(start, matcher)
