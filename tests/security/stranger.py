"""Another user of the host: `python -m tests.security.stranger`, as root, becomes nobody and tries all doors.

Reads JSON from standard input, `{"services": [HOST:PORT, ...], "files": [PATH, ...]}`, and writes what became of it.
Everything is imported before: nobody may be unable to read it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spire.rpc.channel import connect
from spire.rpc.trust import ANYBODY
from tests.security.protocol import METHODS, answer

NOBODY = 65534


def main() -> None:
    asked = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    opened = {file: sorted(opens(Path(file))) for file in asked["files"]}
    print(json.dumps({"uid": os.getuid(), "opened": opened, **asyncio.run(called(asked["services"]))}))


def opens(file: Path) -> set[str]:
    """In which ways it can be opened."""
    found = set()
    for mode in ("rb", "ab"):
        try:
            file.open(mode).close()
            found.add(mode)
        except OSError:
            pass
    try:
        os.listdir(file)
        found.add("list")
    except OSError:
        pass
    with socket.socket(socket.AF_UNIX) as connecting:
        if connecting.connect_ex(str(file)) == 0:
            found.add("connect")
    return found


async def called(services: list[str]) -> dict[str, object]:
    """What each service says of its health, and the status of every other call."""
    calls = {
        f"{method.full_name} of {address}": (await answer(address, method, ANYBODY)).name
        for address in services
        for method in METHODS
    }
    return {"health": [await healthy(address) for address in services], "calls": calls}


async def healthy(address: str) -> str:
    async with connect(address) as channel:
        try:
            said = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(said.status)


if __name__ == "__main__":
    main()
