"""`python -m spire.service.health ADDRESS`: exit with 0 if the service is serving, else print the reason, exit with 1.

    python -m spire.service.health http://127.0.0.1:8000/health
    python -m spire.service.health 127.0.0.1:50051 --tls DIR

This is the health check of containers: the images hold no curl, and Kubernetes' own probes cannot check gRPC over TLS.
HOST:PORT is checked by gRPC's health protocol, which `keep_reporting` serves. Imports no torch, to start fast.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import ProxyHandler, build_opener

from spire.errors import SpireError

if TYPE_CHECKING:
    from grpc_health.v1 import health


def main() -> None:
    parser = argparse.ArgumentParser("python -m spire.service.health", description="Ask a service whether it serves.")
    parser.add_argument("address", help="http(s)://HOST:PORT/PATH, or HOST:PORT of a gRPC service")
    parser.add_argument("--tls", type=Path, help="directory with tls.crt, tls.key and ca.crt, for a gRPC service")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds to wait for the answer (default: 5)")
    asked = parser.parse_args()
    try:
        refusal = refusal_of(asked.address, asked.tls, asked.timeout)
    except SpireError as error:
        refusal = str(error)
    if refusal:
        sys.exit(f"{asked.address}: {refusal}")


def refusal_of(address: str, tls: Path | None, timeout: float) -> str:
    """Return the reason why a service is not serving, or "" if healthy. Raises SpireError for unusable certificates."""
    if not address.startswith(("http://", "https://")):
        return asyncio.run(_of_grpc(address, tls, timeout))
    try:
        # The environment's proxies are not for connections to this container itself.
        with build_opener(ProxyHandler({})).open(address, timeout=timeout):
            return ""
    except OSError as error:
        return str(error)


async def _of_grpc(address: str, directory: Path | None, timeout: float) -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from spire.rpc.channel import connect
    from spire.rpc.tls import Tls, in_words
    from spire.rpc.trust import Trust

    tls = Tls.read(directory)
    async with connect(address, Trust(tls)) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {in_words(error.details(), tls)}"
    serves = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serves else f"answers {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


async def keep_reporting(healthy: health.aio.HealthServicer, well: Callable[[], bool]) -> None:
    """Set the gRPC health status by `well()` every second: a stuck process still answers pings, but must restart."""
    from grpc_health.v1 import health_pb2

    status = health_pb2.HealthCheckResponse
    while True:
        await healthy.set("", status.SERVING if well() else status.NOT_SERVING)
        await asyncio.sleep(1)


if __name__ == "__main__":
    main()
