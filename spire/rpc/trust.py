"""What a service knows its peers by: certificates, a secret, both, or nothing.

With nothing it listens on loopback alone, where every user of the host reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from spire.address import is_loopback
from spire.errors import SpireError
from spire.rpc.secret import Secret
from spire.rpc.tls import Tls

log = structlog.get_logger()


@dataclass(frozen=True)
class Trust:
    tls: Tls | None = None
    secret: Secret | None = None

    @classmethod
    def read(cls, tls: Path | None, secret_file: Path | None) -> Trust:
        """What --tls and --secret-file say. Raises SpireError naming the file that cannot be used."""
        return cls(Tls.read(tls), Secret.read(secret_file))

    def check_host(self, host: str) -> None:
        """Raises SpireError where other machines would reach a service that could not tell its peers from them."""
        if not (self.tls or self.secret or is_loopback(host)):
            raise SpireError(
                f"--host {host} is reached by other machines, and whoever reached it could read all prompts and use "
                "the model: give every service --tls DIR (`spire certs`) or --secret-file FILE, or listen on 127.0.0.1"
            )

    def warn(self, host: str) -> None:
        """Log what listening there leaves open, if anything."""
        if self.tls or (self.secret and is_loopback(host)):
            return
        if self.secret:
            log.warning("secret and prompts can be read on the network: start with --tls, too", host=host)
        else:
            log.warning(
                "any user of this host can read prompts and use the model: start with --secret-file or --tls", host=host
            )


ANYBODY = Trust()
