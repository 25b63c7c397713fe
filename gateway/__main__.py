"""`python -m gateway --verifier HOST:PORT [--draft HOST:PORT] --port 8000`: serve REST until SIGTERM.

Refuses to start when verifier and draft do not belong together. A peer that is not there yet is no reason: requests
get 503 until a verifier comes, and plain decoding until a draft comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from pathlib import Path

import structlog
import uvicorn

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.connections import Connection, Connections
from gateway.descriptors import ACCEPTED_AT_ONCE, Listener, Room, raise_limit
from gateway.engine import Engine
from gateway.keys import Guard, Keys
from gateway.metrics import Metrics
from spire.address import bind, join
from spire.keys import refuse_open_address
from spire.process import announce, keep_announcing, run, stop_signal
from spire.rpc.tls import certificate_files
from spire.rpc.trust import Trust

log = structlog.get_logger("gateway")


def main() -> None:
    run("gateway", GatewayConfig, serve)


async def serve(config: GatewayConfig) -> None:
    """Serve HTTP until a signal. Raises MismatchError when the peers do not belong together."""
    guard = Guard(Keys(config.keys) if config.keys else None)
    certificate, key = certificate_files(config.https) if config.https else (None, None)
    room = Room.within(raise_limit(), config.max_connections)
    listener = Listener(bind(config.host, config.port), room.largest)
    host, port = listener.getsockname()[:2]
    if guard.open_paths is None and not config.without_keys:
        refuse_open_address(host)
    engine = Engine(config, Metrics(config.lanes), Trust.read(config.tls, config.secret_file))
    await engine.handshake()
    server = _Server(
        uvicorn.Config(
            create_app(config, engine, guard, host),
            http=partial(Connection, config, Connections(room.connections, listener.met)),  # type: ignore[arg-type]
            backlog=ACCEPTED_AT_ONCE,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=config.idle_seconds,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
    )
    beside = [
        _announce(server, listener, join(host, port), config.ready_file),
        _stop(server, engine),
        keep_announcing(config.ready_file),
    ]
    tasks = [asyncio.create_task(task) for task in beside]
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()


class _Server(uvicorn.Server):
    """Leaves signals alone: what is running gets its time before HTTP ends."""

    def capture_signals(self) -> contextlib.nullcontext[None]:  # type: ignore[override]
        return contextlib.nullcontext()


async def _stop(server: uvicorn.Server, engine: Engine) -> None:
    """On a signal drain, on a second one at once; then end."""
    await stop_signal()
    log.info("draining")
    hurry = asyncio.create_task(stop_signal())
    await engine.drain(hurry)
    server.should_exit = True
    await hurry  # nothing more hurries, but a signal must not kill


async def _announce(server: uvicorn.Server, listener: Listener, address: str, ready_file: Path | None) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn tells in no other way
        await asyncio.sleep(0.01)
    listener.have_waiting()
    announce(ready_file, address)
    log.info("listening", address=address, pid=os.getpid())


if __name__ == "__main__":
    main()
