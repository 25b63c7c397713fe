"""`python -m gateway --verifier HOST:PORT [--draft HOST:PORT] --port 8000`: serve REST until SIGTERM.

Refuses to start when verifier and draft do not belong together. A peer that is not there yet is no reason: requests
get 503 until a verifier comes, and plain decoding until a draft comes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import structlog
import uvicorn
from pydantic_settings import CliApp

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.engine import Engine
from gateway.metrics import Metrics
from spire.errors import SpireError

log = structlog.get_logger("gateway")


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    # uvicorn raises the signal again once it has shut down: that must not turn a clean end into a death by signal.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _configure_logs()
    config = CliApp.run(GatewayConfig, cli_args=[_long_k(argument) for argument in sys.argv[1:]])
    try:
        asyncio.run(serve(config))
    except SpireError as error:
        log.error("refusing to start", reason=str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        pass


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


def _long_k(argument: str) -> str:
    """`--k` as `-k`: the settings library gives a name of one letter one dash only."""
    return argument[1:] if argument == "--k" or argument.startswith("--k=") else argument


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
    if ready_file is not None:
        unfinished = ready_file.with_name(ready_file.name + ".part")
        unfinished.write_text(address)
        os.replace(unfinished, ready_file)
    log.info("listening", address=address, pid=os.getpid())


def _configure_logs() -> None:
    logging.basicConfig(level=logging.WARNING)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    main()
