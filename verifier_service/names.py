"""Names that gateways and drafts go by: while one is in use it belongs to the process that took it.

Every process tells a number of its own that no other knows, so a name that was read in a log is of no use to others.
Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from spire.errors import InvalidRequest, NotAllowed
from spire.rpc.channel import CALLER_METADATA_KEY


def told(context: grpc.aio.ServicerContext, key: str) -> str:
    """What a call's metadata say under this key; empty where they say nothing."""
    return str(dict(context.invocation_metadata() or ()).get(key, ""))


class Names:
    """`kind`: of whom, for messages."""

    def __init__(self, kind: str):
        self._kind = kind
        # By name, the process that took it, and how often it uses it now.
        self._uses: dict[str, tuple[str, int]] = {}

    @contextmanager
    def held(self, name: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """In use by the calling process inside this block. Raises NotAllowed when another one uses it."""
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
        """Raises NotAllowed when another process than the calling one uses this name, InvalidRequest for no name."""
        if not name:
            raise InvalidRequest(
                f"the {self._kind} that calls does not say its name: spire-{self._kind} in the metadata"
            )
        caller, _ = self._uses.get(name, (told(context, CALLER_METADATA_KEY), 0))
        if caller != told(context, CALLER_METADATA_KEY):
            raise NotAllowed(f"another process is {self._kind} {name} now: a name in use cannot be taken over")
