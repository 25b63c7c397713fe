"""`python -m verifier_service --model DIR`: serve a target until SIGTERM.

Options: `verifier_service/config.py`. Exit code 2 with one line on stderr when it cannot start.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys

# Two services share the cores: a thread that waits must not spin. Read by OpenMP when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import structlog
from prometheus_client import start_http_server
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from spire.errors import SpireError
from spire.model.placement import set_threads
from spire.v1 import verifier_pb2 as pb
from verifier_service.config import VerifierConfig
from verifier_service.engine import Engine
from verifier_service.server import listening, load

log = structlog.get_logger()


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    try:
        asyncio.run(serve(CliApp.run(VerifierConfig)))
    except (SpireError, SettingsError) as error:
        sys.exit(_fail(str(error)))
    except ValidationError as error:
        problems = [f"--{'.'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors()]
        sys.exit(_fail("; ".join(problems)))


def _fail(message: str) -> int:
    print(f"verifier_service: {message}", file=sys.stderr)
    return 2


async def serve(config: VerifierConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises SpireError when it cannot serve."""
    set_threads(config.threads)
    engine, hosted = load(config)
    if config.metrics_port:
        start_http_server(config.metrics_port, config.host, registry=engine.metrics.registry)
    async with listening(engine, hosted, config) as address:
        _announce(config, address, engine, hosted.info)
        stopping = asyncio.create_task(_stop_signal())
        ended = asyncio.wrap_future(engine.ended)
        await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
    await ended


async def _stop_signal() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


def _announce(config: VerifierConfig, address: str, engine: Engine, info: pb.GetInfoResponse) -> None:
    log.info(
        "verifier service listens",
        address=address,
        model=info.model_name,
        fingerprint=info.target_fingerprint,
        dtype=info.dtype,
        max_context=info.max_context,
        max_sequences=info.max_sequences,
        cache_gb=round(engine.steps.cache.bytes / 1e9, 3),
    )
    if config.ready_file:
        part = config.ready_file.with_suffix(".part")
        part.write_text(address)
        part.replace(config.ready_file)


if __name__ == "__main__":
    main()
