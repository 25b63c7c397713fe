"""Where services listen and are reached: HOST:PORT, with an IPv6 host in brackets where a port follows it.

What it does not know: names. They are resolved by whoever connects or listens.
"""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated

from pydantic import AfterValidator

from spire.errors import SpireError

_ADDRESS = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:/]+):(?P<port>\d{1,5})")
# gRPC resolves these by itself.
_TARGET = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|xds):.+")


def join(host: str, port: int) -> str:
    """HOST:PORT, or [HOST]:PORT for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Host without brackets, and port. Raises ValueError for what is no HOST:PORT."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, as in 10.0.0.1:50051, verifier:50051 or [::1]:50051")
    return bare(found["host"]), int(found["port"])


def bare(host: str) -> str:
    """A host without the brackets of an IPv6 address."""
    return host[1:-1] if host[:1] + host[-1:] == "[]" else host


def is_loopback(host: str) -> bool:
    """True where only this machine reaches what listens there."""
    return host == "localhost" or ((number := _number(host)) is not None and number.is_loopback)


def reachable(host: str) -> str:
    """Where this machine reaches what listens at `host`: loopback where that is every address."""
    number = _number(host or "0.0.0.0")
    if number is None or not number.is_unspecified:
        return host
    return "::1" if number.version == 6 else "127.0.0.1"


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound and does not listen yet; port 0 takes a free one. Raises SpireError."""
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


Host = Annotated[str, AfterValidator(bare)]
# Of another service; empty for none.
Peer = Annotated[str, AfterValidator(_peer)]
