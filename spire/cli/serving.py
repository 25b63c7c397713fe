"""The system that a measurement talks to: one that runs already, or one started for it and stopped after it."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spire.bench.system import System
from spire.cli.paths import Pair
from spire.cli.up import ModelOptions, Stack


@contextmanager
def serving(url: str | None, pair: Pair, options: ModelOptions) -> Iterator[System]:
    """The gateway at `url` if given, else services that live as long as this block."""
    if url is not None:
        yield System(url.rstrip("/"))
        return
    ports = {module: _free_port() for module in ("verifier_service", "draft_service")}
    with tempfile.TemporaryDirectory(prefix="spire-") as directory:
        stack = Stack(pair, options, "127.0.0.1", 0, None, Path(directory), metrics_ports=ports)
        try:
            stack.start()
            yield _system(stack)
        finally:
            stack.stop()


def _system(stack: Stack) -> System:
    processes = {service.name: service.process.pid for service in stack.services if service.process}
    metrics = {
        service.name: f"http://127.0.0.1:{port}/metrics"
        for service in stack.services
        if (port := stack.metrics_ports.get(service.module))
    }
    return System(stack.url, processes, metrics)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
