"""The system under measurement: a running gateway, or services started for the measurement and stopped after it."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spire.address import by_tcp, join, split
from spire.bench.system import System
from spire.cli.paths import Pair
from spire.cli.up import ModelOptions, Stack

# Draft deadline for shapes, which may be far too large for this machine: a round must still get its slow draft reply.
_SLOW_DRAFT_SECONDS = "25"


@contextmanager
def serving(
    url: str | None,
    pair: Pair,
    options: ModelOptions,
    synthetic_acceptance: float | None = None,
    gateway_options: Sequence[str] = (),
    directory: Path | None = None,
) -> Iterator[System]:
    """Yield the running gateway at `url` or, without a `url`, new services that are stopped at the end of the block.

    With `synthetic_acceptance` the verifier is lossy: it accepts draft tokens at that rate, regardless of the target.
    Logs are written to `directory`, or to a temporary directory.
    """
    if url is not None:
        yield System(url.rstrip("/"))
        return
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"verifier_service": one.getsockname()[1], "draft_service": other.getsockname()[1]}
    further = {module: ["--metrics-port", str(port)] for module, port in ports.items()}
    further["gateway"] = [*gateway_options]
    if synthetic_acceptance is not None:
        further["verifier_service"] += ["--lossy-synthetic-acceptance", str(synthetic_acceptance)]
        further["gateway"] += ["--draft-deadline", _SLOW_DRAFT_SECONDS]
    with tempfile.TemporaryDirectory(prefix="spire-") as passing:
        stack = Stack(pair, options, "127.0.0.1", 0, None, Path(passing), further=further, logs=directory)
        try:
            stack.start()
            yield _system(stack, ports)
        finally:
            stack.stop()


def _system(stack: Stack, ports: dict[str, int]) -> System:
    """Return the started system. A service serves metrics on its own host, which options may set to any address."""
    metrics = {
        service.name: f"http://{join(by_tcp(split(service.reached_at)[0]), ports[service.module])}/metrics"
        for service in stack.services
        if service.module in ports
    }
    return System(stack.url, {each.name: each.process.pid for each in stack.services if each.process}, metrics)
