"""gRPC channels and servers, with common options that detect a frozen or vanished peer within seconds.

`http2.ping_timeout_ms` matters: with its default a frozen peer is noticed only after a minute.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from spire.address import is_unix, join
from spire.errors import SpireError
from spire.rpc.secret import SECRET_METADATA_KEY, SecretRequired
from spire.rpc.trust import ANYBODY, Trust

# A peer of another version would ignore fields that it does not know: rules, adjustments, logprobs, salts, shared q, or
# the owner of released sequences.
PROTOCOL_VERSION = 14

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# In the metadata of a gateway's Rounds: the gateway's id, and the number of streams that it opened before.
GATEWAY_METADATA_KEY = "spire-gateway"
STREAM_METADATA_KEY = "spire-stream"
# In the metadata of every call: the calling process. No other process knows the value, so none can take a name in use.
CALLER_METADATA_KEY = "spire-caller"
THIS_PROCESS = secrets.token_hex(16)

# A vanished peer is noticed within the sum of the two, which must be below 5 s. The time to answer a ping is the longer
# part: on a busy machine a live peer may be slow to answer, and a missed ping loses every stream.
_PING_AFTER_MS, _PING_ANSWERED_MS = 1000, 3000
_OPTIONS = [
    ("grpc.keepalive_time_ms", _PING_AFTER_MS),
    ("grpc.keepalive_timeout_ms", _PING_ANSWERED_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", _PING_ANSWERED_MS),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

_CLIENT_OPTIONS = [
    *_OPTIONS,
    # Services connect directly, whatever proxy the environment sets.
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
]

_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_AFTER_MS // 2),
    ("grpc.so_reuseport", 0),
]


def connect(address: str, trust: Trust = ANYBODY, caller: str = THIS_PROCESS) -> grpc.aio.Channel:
    """Return a channel to HOST:PORT or unix:PATH, which connects lazily and reconnects by itself."""
    if trust.tls is None:
        channel = grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, trust.tls.of_channel(), options=_CLIENT_OPTIONS)
    secret = [(SECRET_METADATA_KEY, trust.secret.text)] if trust.secret else []
    return _introduced(channel, [(CALLER_METADATA_KEY, caller), *secret])


def new_server(trust: Trust = ANYBODY) -> grpc.aio.Server:
    """Return a gRPC server that has no port yet. Pass the same `trust` to `listen`."""
    interceptors = [SecretRequired(trust.secret)] if trust.secret else []
    return grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)


def listen(server: grpc.aio.Server, host: str, port: int, trust: Trust = ANYBODY) -> int:
    """Open a port and return its number; 0 picks a free port. `port` is ignored if `host` is unix:PATH.

    Raises SpireError if listening fails, or if other machines could reach a server without TLS or secret.
    """
    trust.check_host(host)
    if is_unix(host):
        _check_free(Path(host.removeprefix("unix:")))
    trust.warn(host)
    address = join(host, port)
    try:
        if trust.tls is not None:
            return server.add_secure_port(address, trust.tls.of_server())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise SpireError(f"cannot listen on {address}: is another service there? Choose another address") from error


def _check_free(path: Path) -> None:
    """Raise SpireError if `path` is a regular file or a socket in use: gRPC would delete either when it binds."""
    if not path.exists():
        return
    if not path.is_socket():
        raise SpireError(f"cannot listen on unix:{path}: the file there is no socket. Choose another --host")
    with socket.socket(socket.AF_UNIX) as trying:
        if trying.connect_ex(str(path)) == 0:
            raise SpireError(f"cannot listen on unix:{path}: another service listens there. Choose another --host")


def _introduced(channel: grpc.aio.Channel, own: list[tuple[str, str]]) -> grpc.aio.Channel:
    """Add the metadata `own` to every call of a channel, and return the channel.

    The methods are wrapped, because a gRPC interceptor would add a queue and a task to each message of a stream.
    """

    def introducing(method: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Callable[..., Any]:
            call = method(*args, **options)
            return lambda *request, metadata=None, **rest: call(*request, metadata=(*own, *(metadata or ())), **rest)

        return made

    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, introducing(getattr(channel, kind)))
    return channel
