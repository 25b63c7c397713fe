"""Addresses of services: HOST:PORT ([HOST]:PORT for IPv6), or unix:PATH, a socket that only this host can reach.

Does not know: name resolution, which is done on connecting or listening.
"""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated

from pydantic import AfterValidator

from spire.errors import SpireError

_ADDRESS = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:/]+):(?P<port>\d{1,5})")
# Target schemes that gRPC resolves by itself.
_TARGET = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|xds):.+")
# Paths of Unix sockets that gRPC accepts literally: other characters have a special meaning to gRPC.
_UNIX_PATH = re.compile(r"/[A-Za-z0-9._/~+=@-]+")
_LONGEST_UNIX_PATH = 107


def is_unix(host: str) -> bool:
    """True if `host` is unix:PATH, which has no port."""
    return host.startswith("unix:")


def join(host: str, port: int) -> str:
    """Return HOST:PORT, [HOST]:PORT for IPv6, or unix:PATH."""
    if is_unix(host):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Split HOST:PORT into host (without brackets) and port, or unix:PATH into itself and 0. Raises ValueError."""
    if is_unix(address):
        return address, 0
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, as in 10.0.0.1:50051, verifier:50051 or [::1]:50051")
    return bare(found["host"]), int(found["port"])


def bare(host: str) -> str:
    """Return `host` without the brackets of an IPv6 address."""
    return host[1:-1] if host[:1] + host[-1:] == "[]" else host


def is_loopback(host: str) -> bool:
    """True if `host` is a loopback address, which only this machine can reach."""
    return host == "localhost" or ((number := _number(host)) is not None and number.is_loopback)


def by_tcp(host: str) -> str:
    """Return the host on which a service at `host` serves metrics: `host` itself, or loopback if it is unix:PATH."""
    return "127.0.0.1" if is_unix(host) else host


def reachable(host: str) -> str:
    """Return the host at which this machine can connect to a listener on `host`: loopback if `host` is a wildcard."""
    number = _number(host or "0.0.0.0")
    if number is None or not number.is_unspecified:
        return host
    return "::1" if number.version == 6 else "127.0.0.1"


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound but not listening; port 0 picks a free port. Raises SpireError on failure."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SpireError(f"cannot listen on {host}: {error.strerror}. Choose another --host") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise SpireError(
            f"cannot listen on {join(host, port)} ({error.strerror}): "
            "stop what uses it, or choose another with --port (0 takes a free one)"
        ) from error
    return bound


def _number(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _peer(address: str) -> str:
    if address and not _TARGET.fullmatch(address):
        split(address)
    return address


def fits_unix(path: str) -> bool:
    """True if a Unix socket can have this path: absolute, at most 107 bytes, letters, digits and ._/~+=@- only."""
    return len(path.encode()) <= _LONGEST_UNIX_PATH and _UNIX_PATH.fullmatch(path) is not None


def _host(host: str) -> str:
    if is_unix(host) and not fits_unix(path := host.removeprefix("unix:")):
        raise ValueError(
            f"unix:{path} cannot be a socket: name an absolute path of at most {_LONGEST_UNIX_PATH} bytes, of letters, "
            "digits and ._/~+=@-"
        )
    return bare(host)


# Address to listen on: a host, or unix:PATH.
Host = Annotated[str, AfterValidator(_host)]
# Address of another service; empty for none.
Peer = Annotated[str, AfterValidator(_peer)]
