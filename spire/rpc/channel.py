"""Channels and servers with one set of options, so that a frozen or vanished peer is noticed in seconds.

`http2.ping_timeout_ms` matters: its default lets a frozen peer hide for a minute.
"""

from __future__ import annotations

import grpc

PROTOCOL_VERSION = 1

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

GATEWAY_METADATA_KEY = "spire-gateway"

_CLIENT_OPTIONS = [
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

_SERVER_OPTIONS = [
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`. It connects lazily and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)


def new_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_SERVER_OPTIONS)
