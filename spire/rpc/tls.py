"""Mutual TLS between the services: each has a certificate, its key, and the CA that both sides trust, in a directory.

    tls.crt  tls.key  ca.crt        as in a Kubernetes secret; `spire certs` makes such directories

Whoever has a certificate of the CA is let in, and a server's must be for the name that it is called by. What it does
not know: which service a certificate is for, and renewal: a service reads its files when it starts.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from spire.errors import SpireError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"

# What gRPC says of a handshake that failed, and what to do. Whom a server turns away is not told why.
_CONNECTING, _TURNED_AWAY = "failed to connect", "Socket closed"
_REASONS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS: start it with --tls too",
    "Hostname Verification Check failed": "its certificate is for another name: `spire certs DIR --host NAME`",
    "certificate has expired": "its certificate has expired: `spire certs DIR` renews it",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the CA in --tls: both must be of one `spire certs DIR`",
}


@dataclass(frozen=True)
class Tls:
    """PEM as it is in the files."""

    certificate: bytes
    key: bytes
    authority: bytes

    @classmethod
    def read(cls, directory: Path | None) -> Tls | None:
        """What a service was told by --tls; None where it was told nothing. Raises SpireError naming the file."""
        if directory is None:
            return None
        certificate, key = certificate_files(directory)
        authority = directory / AUTHORITY
        try:
            ssl.create_default_context(cafile=str(authority))
            return cls(certificate.read_bytes(), key.read_bytes(), authority.read_bytes())
        except (OSError, ValueError) as error:
            raise SpireError(_complaint(directory, AUTHORITY, error)) from error

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.authority, require_client_auth=True)

    def of_channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def certificate_files(directory: Path) -> tuple[Path, Path]:
    """A certificate and its key. Raises SpireError where they are not there or not for one another."""
    certificate, key = directory / CERTIFICATE, directory / KEY
    try:
        # Without a password a key that needs one would be asked for at the terminal.
        ssl.create_default_context().load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise SpireError(_complaint(directory, f"{CERTIFICATE} and {KEY}", error)) from error
    return certificate, key


def _complaint(directory: Path, names: str, error: Exception) -> str:
    return f"{directory}: {names} cannot be used ({error}); `spire certs DIR` makes such a directory for each service"


def in_words(details: str | None, tls: Tls | None) -> str:
    """Why a peer cannot be reached: what gRPC says, and what it means if it is about TLS."""
    said = details or "no reason was given"
    reason = next((words for sign, words in _REASONS.items() if sign in said), "")
    if not reason and _CONNECTING in said and _TURNED_AWAY in said:
        reason = "it turned this service away: "
        reason += "its log says what is wrong with our certificate" if tls else "if it has --tls, this one needs it too"
    return f"{said} ({reason})" if reason else said
