"""Serve a target until SIGTERM: `python -m verifier_service --model DIR`.

Options: `verifier_service/config.py`. Exit code 2, with one line on stderr, if the service cannot start; 3 if the model
was stuck at shutdown; 4 if the GPU was lost.
"""

from __future__ import annotations

import asyncio
import os

import structlog
from prometheus_client import start_http_server

from spire.address import by_tcp
from spire.rpc.trust import Trust
from spire.service.heap import keep_freed_memory
from spire.service.process import announce, keep_announcing, on_passing_thread, run, stop_signal
from verifier_service.config import VerifierConfig

# isort: split
from spire.model.placement import set_threads
from verifier_service.serve.server import listening, load

_STUCK = 3

log = structlog.get_logger("verifier_service")


def main() -> None:
    run("verifier_service", VerifierConfig, serve)


async def serve(config: VerifierConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises SpireError if the target cannot be served."""
    trust = Trust.read(config.tls, config.secret_file)
    trust.check_host(config.host)
    keep_freed_memory()
    set_threads(config.threads)
    engine, hosted = on_passing_thread(lambda: load(config))
    if config.metrics_port:
        start_http_server(config.metrics_port, by_tcp(config.host), registry=engine.metrics.registry)
    async with listening(engine, hosted, config, trust, config.drain_seconds) as address:
        log.info(
            "verifier service listens",
            address=address,
            model=hosted.info.model_name,
            fingerprint=hosted.info.target_fingerprint,
            dtype=hosted.info.dtype,
            max_context=hosted.info.max_context,
            max_sequences=hosted.info.max_sequences,
            cache_gb=round(engine.steps.cache.bytes / 1e9, 3),
        )
        stopping = asyncio.create_task(stop_signal())
        await asyncio.sleep(0)  # signal handlers are installed before the address is announced
        announce(config.ready_file, address)
        telling = asyncio.create_task(
            keep_announcing(config.ready_file, lambda: not engine.pace.is_stuck(config.stuck_seconds))
        )
        ended = asyncio.wrap_future(engine.ended)
        await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.wait([stopping])
    telling.cancel()
    if not engine.ended.done():
        os._exit(_STUCK)  # a thread cannot be killed, and one inside a model does not survive the interpreter's end
    await ended


if __name__ == "__main__":
    main()
