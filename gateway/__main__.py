"""`python -m gateway --verifier HOST:PORT [--draft HOST:PORT] --port 8000`: serve REST until SIGTERM.

Refuses to start when verifier and draft do not belong together. A peer that is not there yet is no reason: requests
get 503 until a verifier comes, and plain decoding until a draft comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path

import structlog
import uvicorn

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.engine import Engine
from gateway.metrics import Metrics
from spire.errors import SpireError
from spire.process import announce, run

log = structlog.get_logger("gateway")


def main() -> None:
    # uvicorn raises the signal again once it has shut down: that must not turn a clean end into a death by signal.
    signal.signal(signal.SIGTERM, lambda *_: None)
    logging.basicConfig(level=logging.WARNING)
    run("gateway", GatewayConfig, serve)


async def serve(config: GatewayConfig) -> None:
    """Serve HTTP until a signal. Raises MismatchError when the peers do not belong together."""
    engine = Engine(config, Metrics())
    await engine.handshake()
    listener = _bind(config.host, config.port)
    host, port = listener.getsockname()[:2]
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(config, engine),
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    announcement = asyncio.create_task(_announce(server, f"{host}:{port}", config.ready_file))
    await server.serve(sockets=[listener])
    announcement.cancel()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise SpireError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port") from error
    return listener


async def _announce(server: uvicorn.Server, address: str, ready_file: Path | None) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn tells in no other way
        await asyncio.sleep(0.01)
    announce(ready_file, address)
    log.info("listening", address=address, pid=os.getpid())


if __name__ == "__main__":
    main()
