"""Channels and servers with one set of options, so that a frozen or vanished peer is noticed in seconds.

`http2.ping_timeout_ms` matters: its default lets a frozen peer hide for a minute.
"""

from __future__ import annotations

import grpc
import structlog

from spire.address import is_loopback, join
from spire.errors import SpireError
from spire.rpc.tls import Tls

# A peer of another version would leave out what it does not know of: rules, adjustments, logprobs, salts, shared q.
PROTOCOL_VERSION = 8

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# In the metadata of a draft's Orders: who it is.
DRAFT_METADATA_KEY = "spire-draft"
# In the metadata of a gateway's Rounds: who it is, and how many streams it opened before.
GATEWAY_METADATA_KEY = "spire-gateway"
STREAM_METADATA_KEY = "spire-stream"
# The boot id of its host, if it can open what the verifier makes in memory there.
HOST_METADATA_KEY = "spire-host"

# A peer that is gone without a word is noticed within their sum.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
]

_CLIENT_OPTIONS = [
    *_KEEPALIVE,
    # Services reach one another directly, whatever proxy the environment names.
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

_SERVER_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]


log = structlog.get_logger()


def connect(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`. It connects lazily and reconnects by itself."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)
    return grpc.aio.secure_channel(address, tls.of_channel(), options=_CLIENT_OPTIONS)


def new_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_SERVER_OPTIONS)


def listen(server: grpc.aio.Server, host: str, port: int, tls: Tls | None) -> int:
    """Open the port, 0 for a free one, and return it. Raises SpireError where that cannot be."""
    address = join(host, port)
    try:
        if tls is not None:
            return server.add_secure_port(address, tls.of_server())
        if not is_loopback(host):
            log.warning("whoever reaches this port is served: start with --tls, or keep others away", address=address)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise SpireError(f"cannot listen on {address}: is another service there? Choose another --port") from error
