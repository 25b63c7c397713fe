"""`python -m verifier_service --model DIR`: serve a target until SIGTERM.

Options: `verifier_service/config.py`. Exit code 2 with one line on stderr when it cannot start, 3 when its model was
stuck at the end, 4 when its GPU was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

import structlog
from prometheus_client import start_http_server

from spire.process import announce, keep_announcing, on_passing_thread, run, stop_signal
from spire.rpc.trust import Trust
from verifier_service.config import VerifierConfig

# isort: split
from spire.model.placement import keep_freed_memory, set_threads
from verifier_service.server import listening, load

_STUCK = 3

log = structlog.get_logger("verifier_service")


def main() -> None:
    run("verifier_service", VerifierConfig, serve)


async def serve(config: VerifierConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises SpireError when it cannot serve."""
    trust = Trust.read(config.tls, config.secret_file)
    trust.check_host(config.host)
    keep_freed_memory()
    set_threads(config.threads)
    engine, hosted = on_passing_thread(lambda: load(config))
    if config.metrics_port:
        start_http_server(config.metrics_port, config.host, registry=engine.metrics.registry)
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
        await asyncio.sleep(0)  # it listens before anybody knows whom to stop
        announce(config.ready_file, address)
        telling = asyncio.create_task(
            keep_announcing(config.ready_file, lambda: not engine.pace.is_stuck(config.stuck_seconds))
        )
        ended = asyncio.wrap_future(engine.ended)
        await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
    telling.cancel()
    if not engine.ended.done():
        os._exit(_STUCK)  # no thread can be ended from outside, and none in a model outlives its interpreter
    await ended


if __name__ == "__main__":
    main()
