"""Names of gateways and drafts: a name in use belongs to the process that took it.

Every process sends a secret random id, so a name read in a log is of no use to others. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from spire.errors import InvalidRequest, NotAllowed
from spire.rpc.channel import CALLER_METADATA_KEY


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
        """Use a name for the calling process inside this block. Raises NotAllowed if another process uses it."""
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
            raise InvalidRequest(
                f"the {self._kind} that calls does not say its name: spire-{self._kind} in the metadata"
            )
        caller, _ = self._uses.get(name, (told(context, CALLER_METADATA_KEY), 0))
        if caller != told(context, CALLER_METADATA_KEY):
            raise NotAllowed(f"another process is {self._kind} {name} now: a name in use cannot be taken over")
