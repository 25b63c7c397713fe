"""Mutual TLS between services. A service has a directory with its certificate, its key and the CA that all trust.

    tls.crt  tls.key  ca.crt        as in a Kubernetes secret; `spire certs` makes such directories

Every client with a certificate of the CA is accepted. A server's certificate must be for the name that clients use.
Does not know: which service a certificate is for, and renewal: a service reads its files when it starts.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import grpc

from spire.errors import SpireError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"

# gRPC's messages about a failed handshake, and the remedies. A server does not tell a refused client the reason.
_CONNECTING, _TURNED_AWAY = "failed to connect", "Socket closed"
_REASONS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS: start it with --tls too",
    "Hostname Verification Check failed": "its certificate is for another name: `spire certs DIR --host NAME`",
    "certificate has expired": "its certificate has expired: `spire certs DIR` renews it",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the CA in --tls: both must be of one `spire certs DIR`",
}


class Tls(NamedTuple):
    """A service's certificate, its private key and the CA certificate, each in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes

    @classmethod
    def read(cls, directory: Path | None) -> Tls | None:
        """Read the files in the directory of --tls; None if no directory is given. Raises SpireError naming a file."""
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
    """Return the paths of certificate and key. Raises SpireError if they cannot be read or do not match."""
    certificate, key = directory / CERTIFICATE, directory / KEY
    try:
        # Without `password`, an encrypted key would prompt at the terminal.
        ssl.create_default_context().load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise SpireError(_complaint(directory, f"{CERTIFICATE} and {KEY}", error)) from error
    return certificate, key


def _complaint(directory: Path, names: str, error: Exception) -> str:
    return f"{directory}: {names} cannot be used ({error}); `spire certs DIR` makes such a directory for each service"


def in_words(details: str | None, tls: Tls | None) -> str:
    """Return the reason for a failed connection: gRPC's `details`, with an explanation if TLS is the cause."""
    said = details or "no reason was given"
    reason = next((words for sign, words in _REASONS.items() if sign in said), "")
    if not reason and _CONNECTING in said and _TURNED_AWAY in said:
        reason = "it turned this service away: "
        reason += "its log says what is wrong with our certificate" if tls else "if it has --tls, this one needs it too"
    return f"{said} ({reason})" if reason else said
