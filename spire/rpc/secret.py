"""A secret that the services of one system share: every call carries the secret, and servers refuse calls without it.

The secret is one word in a file that only its owner, or the owner's group, can read. `spire up` makes a secret at every
start; `openssl rand -hex 32` makes one for services started alone. The secret never appears in arguments, the
environment or a log. Does not know: encryption, which TLS does between hosts (`spire/rpc/tls.py`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from spire.errors import SpireError

SECRET_METADATA_KEY = "spire-secret"
# A supervisor asks only for a service's health, and has no secret.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_TEXT = re.compile(r"[\x21-\x7e]{16,512}")
_READABLE_BY_OTHERS = 0o007

log = structlog.get_logger()


@dataclass(frozen=True)
class Secret:
    text: str = field(repr=False)

    @classmethod
    def read(cls, file: Path | None) -> Secret | None:
        """Read the secret in the file of --secret-file; None if no file is given. Raises SpireError naming the file."""
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
        """True if the metadata of a call contain the secret. Compares in constant time."""
        presented = metadata.get(SECRET_METADATA_KEY, "")
        presented = presented.encode() if isinstance(presented, str) else presented
        return secrets.compare_digest(presented, self.text.encode())


def make_secret(file: Path) -> None:
    """Write a new secret to a new file that only its owner can read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
        made.write(secrets.token_hex(32))


class SecretRequired(grpc.aio.ServerInterceptor):
    """Server interceptor that refuses calls without the secret, except health checks."""

    def __init__(self, secret: Secret):
        self._secret = secret

    async def intercept_service(self, continuation: Callable[..., Any], call: grpc.HandlerCallDetails) -> Any:
        metadata = dict(call.invocation_metadata or ())
        if call.method.startswith(_OPEN_TO_ALL) or self._secret.is_in(metadata):
            return await continuation(call)
        came = "another" if SECRET_METADATA_KEY in metadata else "none"
        log.warning("turned a call away: it lacks the secret", method=call.method, came=came)
        return _refusing(f"this service asks for a secret and {came} came: start both with the same --secret-file")


def _refusing(reason: str) -> grpc.RpcMethodHandler:
    """Return a handler that refuses calls of any kind without reading their messages."""

    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)
