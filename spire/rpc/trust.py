"""Authentication of a service's peers: by certificates, by a secret, by both, or not at all.

Without authentication a service listens only on loopback or a Unix socket. Every user of the host can reach loopback.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import structlog

from spire.address import is_loopback, is_unix
from spire.errors import SpireError
from spire.rpc.secret import Secret
from spire.rpc.tls import Tls

log = structlog.get_logger()


class Trust(NamedTuple):
    tls: Tls | None = None
    secret: Secret | None = None

    @classmethod
    def read(cls, tls: Path | None, secret_file: Path | None) -> Trust:
        """Read --tls and --secret-file. Raises SpireError naming the file that cannot be used."""
        return cls(Tls.read(tls), Secret.read(secret_file))

    def check_host(self, host: str) -> None:
        """Raise SpireError if the service must not listen on `host`: a host that other machines can reach needs TLS or
        a secret, and a Unix socket needs an existing directory and excludes TLS."""
        if is_unix(host):
            if self.tls:
                raise SpireError(f"--host {host} and --tls do not go together: certificates name hosts. Leave one out")
            if not _directory(host).is_dir():
                raise SpireError(f"--host {host}: there is no directory {_directory(host)}")
        if not (self.tls or self.secret or _stays_here(host)):
            raise SpireError(
                f"--host {host} is reached by other machines, and whoever reached it could read all prompts and use "
                "the model: give every service --tls DIR (`spire certs`) or --secret-file FILE, or listen on 127.0.0.1"
            )

    def warn(self, host: str) -> None:
        """Log a warning if others could read the traffic of a service that listens on `host`, or could call it."""
        if self.tls or (self.secret and _stays_here(host)):
            return
        if is_unix(host) and not _directory(host).stat().st_mode & 0o077:
            return  # a socket in a directory that no other user may enter
        if self.secret:
            log.warning("secret and prompts can be read on the network: start with --tls, too", host=host)
        else:
            log.warning(
                "any user of this host can read prompts and use the model: start with --secret-file or --tls", host=host
            )


def _stays_here(host: str) -> bool:
    """True if only this machine can reach a listener on `host`."""
    return is_unix(host) or is_loopback(host)


def _directory(unix_host: str) -> Path:
    return Path(unix_host.removeprefix("unix:")).parent


ANYBODY = Trust()
