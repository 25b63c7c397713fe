"""The gateway process: `python -m gateway --verifier HOST:PORT --port 8000` serves REST until SIGTERM.

The gateway refuses to start if the verifier has another protocol version, but starts without a verifier: requests get
503 until a verifier connects, and are decoded plainly (without draft tokens) until a draft connects to the verifier.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from pathlib import Path

import structlog
import uvicorn

from gateway.api.app import create_app
from gateway.config import GatewayConfig
from gateway.http.connections import Connection, Connections
from gateway.http.descriptors import ACCEPTED_AT_ONCE, WAITING, Listener, raise_limit, room_within
from gateway.http.keys import Guard, Keys
from gateway.metrics import Metrics
from gateway.rounds.engine import Engine
from spire.address import bind, join
from spire.rpc.tls import certificate_files
from spire.rpc.trust import Trust
from spire.service.heap import return_freed_memory
from spire.service.keys import refuse_open_address
from spire.service.process import announce, keep_announcing, run, stop_signal

log = structlog.get_logger("gateway")


def main() -> None:
    run("gateway", GatewayConfig, serve)


async def serve(config: GatewayConfig) -> None:
    """Serve HTTP until SIGTERM or SIGINT. Raises MismatchError if the verifier has another protocol version."""
    return_freed_memory()
    guard = Guard(Keys(config.keys) if config.keys else None)
    certificate, key = certificate_files(config.https) if config.https else (None, None)
    most_connections, largest = room_within(raise_limit(), config.max_connections)
    listener = Listener(bind(config.host, config.port), largest)
    host, port = listener.getsockname()[:2]
    if guard.open_paths is None and not config.without_keys:
        refuse_open_address(host)
    engine = Engine(config, Metrics(), Trust.read(config.tls, config.secret_file))
    await engine.handshake()
    server = _Server(
        uvicorn.Config(
            create_app(config, engine, guard, host),
            http=partial(Connection, config, Connections(most_connections, listener.met)),  # type: ignore[arg-type]
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
    tasks = [
        asyncio.create_task(_announce(server, listener, join(host, port), config.ready_file)),
        asyncio.create_task(_stop(server, engine)),
        asyncio.create_task(keep_announcing(config.ready_file)),
    ]
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers: `_stop` lets running requests end before the server stops."""

    def capture_signals(self) -> contextlib.nullcontext[None]:  # type: ignore[override]
        return contextlib.nullcontext()


async def _stop(server: uvicorn.Server, engine: Engine) -> None:
    """Wait for a stop signal, drain the engine (a second signal ends all requests at once), and stop the server."""
    await stop_signal()
    log.info("draining")
    hurry = asyncio.create_task(stop_signal())
    await engine.drain(hurry)
    server.should_exit = True
    await hurry  # the engine has drained: a second signal has no effect now, but must not kill the process


async def _announce(server: uvicorn.Server, listener: Listener, address: str, ready_file: Path | None) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn has no notification
        await asyncio.sleep(0.01)
    listener.listen(WAITING)  # after the event loop's own call, which sets a smaller backlog
    announce(ready_file, address)
    log.info("listening", address=address, pid=os.getpid())


if __name__ == "__main__":
    main()
