"""A secret that the services of one system share: each call carries it, and a server answers no call without it.

It is one word in a file that only its owner, or its owner's group, can read. `spire up` makes one at every start; for
services that are started alone `openssl rand -hex 32` does. It never stands in arguments, the environment or a log.
What it does not do: hide anything. Beyond one host TLS does (`spire/rpc/tls.py`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from spire.errors import SpireError

SECRET_METADATA_KEY = "spire-secret"
# Whoever supervises a service asks for its health and nothing else, and has no secret.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_TEXT = re.compile(r"[\x21-\x7e]{16,512}")
_READABLE_BY_OTHERS = 0o007

log = structlog.get_logger()


@dataclass(frozen=True)
class Secret:
    text: str = field(repr=False)

    @classmethod
    def read(cls, file: Path | None) -> Secret | None:
        """What --secret-file holds; None where no file was named. Raises SpireError naming the file."""
        if file is None:
            return None
        try:
            text, mode = file.read_text().strip(), file.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise SpireError(f"--secret-file {file} cannot be read: {error}") from error
        if mode & _READABLE_BY_OTHERS:
            raise SpireError(f"--secret-file {file} can be read by every user of this host: chmod 600 {file}")
        if not _TEXT.fullmatch(text):
            raise SpireError(
                f"--secret-file {file} must hold one word of 16 to 512 visible ASCII characters: "
                f"openssl rand -hex 32 > {file}"
            )
        return cls(text)

    def is_in(self, metadata: dict[str, str | bytes]) -> bool:
        """True for a call that carries it. Takes as long for any other text of its length."""
        presented = metadata.get(SECRET_METADATA_KEY, "")
        presented = presented.encode() if isinstance(presented, str) else presented
        return secrets.compare_digest(presented, self.text.encode())


def make_secret(file: Path) -> None:
    """A new secret in a new file that its owner alone can read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
        made.write(secrets.token_hex(32))


Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class SecretRequired(grpc.aio.ServerInterceptor):
    """Refuses every call without the secret but those for the service's health."""

    def __init__(self, secret: Secret):
        self._secret = secret

    async def intercept_service(self, continuation: Continuation, call: grpc.HandlerCallDetails) -> Any:
        metadata = dict(call.invocation_metadata or ())
        if call.method.startswith(_OPEN_TO_ALL) or self._secret.is_in(metadata):
            return await continuation(call)
        came = "another" if SECRET_METADATA_KEY in metadata else "none"
        log.warning("turned a call away: it lacks the secret", method=call.method, came=came)
        return _refusing(f"this service asks for a secret and {came} came: start both with the same --secret-file")


def _refusing(reason: str) -> grpc.RpcMethodHandler:
    """A handler of any kind of call, which reads nothing of it."""

    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)
