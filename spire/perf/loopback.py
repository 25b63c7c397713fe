"""The cost of a gRPC stream between processes: `wire_cost()` starts an echo server and times round trips of tensors.

`python -m spire.perf.loopback` runs the server, which prints its port and ends when its standard input is closed.
Channels have the options of all Spire channels. Does not know: a network; both ends are on this machine.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import grpc

from spire.perf.hardware import Cost
from spire.rpc.channel import connect, new_server
from spire.v1.tensor_pb2 import Tensor

_SERVICE, _METHOD = "spire.loopback", "Echo"
_SMALL, _LARGE = 256, 2**20
_TRIPS = 200


def wire_cost() -> Cost:
    """Measure round trips on a bidirectional gRPC stream: seconds per trip (`fixed`), and per byte one way (`each`)."""
    command = [sys.executable, "-m", "spire.perf.loopback"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            small, large = asyncio.run(_round_trips(int(server.stdout.readline())))
        finally:
            server.stdin.close()
    each = max(0.0, (large - small) / (2 * (_LARGE - _SMALL)))
    return Cost(max(0.0, small - 2 * _SMALL * each), each)


async def _round_trips(port: int) -> tuple[float, float]:
    async with connect(f"127.0.0.1:{port}") as channel:
        echo = channel.stream_stream(f"/{_SERVICE}/{_METHOD}", Tensor.SerializeToString, Tensor.FromString)
        stream = echo(wait_for_ready=True)
        try:
            return await _median_trip(stream, _SMALL), await _median_trip(stream, _LARGE)
        finally:
            stream.cancel()


async def _median_trip(stream: grpc.aio.StreamStreamCall, size: int) -> float:
    message, times = Tensor(data=bytes(size)), []
    for _ in range(_TRIPS):
        began = time.perf_counter()
        await stream.write(message)
        await stream.read()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def _echo(requests: AsyncIterator[Tensor], context: grpc.aio.ServicerContext) -> AsyncIterator[Tensor]:
    async for message in requests:
        yield message


async def _serve() -> None:
    server = new_server()
    method = grpc.stream_stream_rpc_method_handler(_echo, Tensor.FromString, Tensor.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace=None)


if __name__ == "__main__":
    asyncio.run(_serve())
