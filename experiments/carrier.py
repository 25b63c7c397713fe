"""The cost of carrying a round's activations inline, in shared memory, and in a GPU's memory. Two processes, one host.

    python experiments/carrier.py            a table
    python experiments/carrier.py --json     the same as one line of JSON, the last of the output

Added latency: from the moment the rows are a contiguous tensor on the verifier's model thread to the moment they are a
tensor on the draft's. Between them is what the services run: Subscriber, stream, Follower, Worker. Shapes: an 8B target
at B = 64 (220 tokens of 8 tapped layers × 4,096: 14.4 MB a round) and the bundled pair at B = 16. Rows are written just
before they are sent, as a forward does, and every byte is compared after it has arrived.

Where torch sees a GPU, rows lie there at both ends, and are also carried by CUDA IPC: then nothing leaves the GPU.

Beside it what ought to come out: the bytes at the speed of a plain copy, or of a stream, and half a round trip. Where
shared memory takes longer, the parts say why: the copy goes to memory that no cache holds any more, and every thread
on the way has to be woken, which those of a busy stream need not. A mapping made for the message would be far worse,
for its pages would be touched for the first time: that is measured too.

What it does not know: a verifier and a draft that compute meanwhile. CLOCK_MONOTONIC, which the processes of a host
share, is read on both sides; the product never does so.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import grpc
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from draft_service.drafter import Verified
from draft_service.follower import Follower
from draft_service.requests import Requests
from draft_service.worker import Worker
from spire.perf.hardware import Cost
from spire.perf.loopback import wire_cost
from spire.rpc.carrier import CUDA_IPC, INLINE, SHARED_MEMORY, Ring
from spire.rpc.channel import connect, new_server
from spire.rpc.cuda_ipc import gpu_of
from spire.rpc.host import host_id
from spire.v1 import draft_pb2 as pb, draft_pb2_grpc as rpc
from verifier_service.feed.delivery import Delivery, Picked
from verifier_service.feed.subscriber import Subscriber
from verifier_service.serve.draft_connections import MAX_RING_BYTES

console = Console(stderr=True)

WARM_UP = 10
# Rounds come this far apart at the least: whatever waits has gone to sleep.
PAUSE_SECONDS = 0.005
CPU = torch.device("cpu")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Shape:
    """Rows of one round, bfloat16."""

    name: str
    rows: int
    layers: int
    width: int

    @property
    def bytes(self) -> int:
        return self.rows * self.layers * self.width * 2

    def tensor(self) -> Tensor:
        return torch.zeros(self.rows, self.layers, self.width, dtype=torch.bfloat16, device=DEVICE)


SHAPES = (Shape("8B target, B = 64", 220, 8, 4096), Shape("bundled pair, B = 16", 54, 2, 256))


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each run.", min=1)] = 100,
    runs: Annotated[int, typer.Option(help="Runs of each carrier, alternating; that of median p50 is told.")] = 3,
    shared_memory: Annotated[Path, typer.Option(help="Directory in memory.")] = Path("/dev/shm"),
    threads: Annotated[int, typer.Option(help="Compute threads of each process.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    serve: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure all carriers at both shapes."""
    torch.set_num_threads(threads)
    if serve:
        asyncio.run(serve_rounds(next(shape for shape in SHAPES if shape.name == serve), rounds, shared_memory))
        return
    wire = wire_cost()
    report: dict[str, Any] = {"machine": machine(threads), "rounds": rounds, "runs": runs, "shapes": []}
    for shape in SHAPES:
        report["shapes"].append(measure_shape(shape, rounds, runs, shared_memory, threads, wire))
    print(json.dumps(report)) if as_json else console.print(table(report))


def machine(threads: int) -> dict[str, Any]:
    """The machine that this runs on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gpu = {"gpu": torch.cuda.get_device_name(DEVICE)} if DEVICE.type == "cuda" else {}
    return {"processor": model, "cores": os.cpu_count(), "threads": threads, "torch": torch.__version__} | gpu


def measure_shape(shape: Shape, rounds: int, runs: int, directory: Path, threads: int, wire: Cost) -> dict[str, Any]:
    """Latencies in milliseconds."""
    copy, fresh = copy_ms(shape, rounds), copy_ms(shape, 5, fresh=True)
    message = wire.fixed / 2 * 1e3
    modelled = {INLINE: message + shape.bytes * wire.each * 1e3, SHARED_MEMORY: message + copy}
    if DEVICE.type == "cuda":
        modelled[CUDA_IPC] = message + copy_ms(shape, rounds, to=DEVICE)
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in modelled}
    for _ in range(runs):
        for name, found in measured.items():
            found.append(measure(shape, name, rounds, directory, threads))
    carriers = {
        name: {"modelled_ms": round(expected, 3)} | median_run(measured[name]) for name, expected in modelled.items()
    }
    plain = {"copy_ms": round(copy, 3), "copy_to_fresh_mapping_ms": round(fresh, 3), "message_ms": round(message, 3)}
    return asdict(shape) | {"bytes": shape.bytes} | plain | {"carriers": carriers}


def median_run(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median p50, and the p50 of all."""
    ordered = sorted(found, key=lambda run: run["ms"]["p50"])
    return ordered[(len(ordered) - 1) // 2] | {"p50_of_all_runs": [run["ms"]["p50"] for run in ordered]}


def copy_ms(shape: Shape, times: int, fresh: bool = False, to: torch.device = CPU) -> float:
    """A plain copy of a round, the median: into memory already touched, or each time into a mapping made for it."""
    rows, touched = shape.tensor(), torch.zeros_like(shape.tensor(), device=to)
    spent = []
    for value in range(times):
        rows.fill_(value)
        into = torch.frombuffer(mmap.mmap(-1, shape.bytes), dtype=rows.dtype).view(rows.shape) if fresh else touched
        finish()
        began = time.perf_counter()
        into.copy_(rows)
        finish()
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent)


def finish() -> None:
    """Wait for what was asked of the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def quantiles(spent: list[float]) -> dict[str, float]:
    ordered = sorted(spent)
    return {"p50": round(statistics.median(ordered), 3), "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 3)}


# --- the draft's side ---------------------------------------------------------------------------------------------


def measure(shape: Shape, carrier: str, rounds: int, directory: Path, threads: int) -> dict[str, Any]:
    """Latency of a round, and its parts: until rows are copied, on the draft's event loop, on its model thread."""
    command = [sys.executable, __file__, "--serve", shape.name, "--rounds", str(rounds), "--threads", str(threads)]
    command += ["--shared-memory", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            arrived = asyncio.run(follow(shape, carrier, rounds, port, directory))
            server.stdin.close()
            sent: list[tuple[int, int]] = json.loads(server.stdout.readline())
        finally:
            server.kill()
    times = [(*here, *there) for here, there in zip(sent, arrived, strict=True)][WARM_UP:]

    def between(first: int, last: int) -> dict[str, float]:
        return quantiles([(moments[last] - moments[first]) / 1e6 for moments in times])

    parts = {"copy_ms": between(0, 1), "stream_ms": between(1, 2), "thread_ms": between(2, 3)}
    return {"ms": between(0, 3)} | parts


async def follow(shape: Shape, carrier: str, rounds: int, port: int, directory: Path) -> list[tuple[int, int]]:
    """Subscribe as the draft service does. When each round was on the event loop and on the model thread, in ns."""
    drafter = Arrivals(shape)
    worker = TimedWorker(drafter, wait_seconds=0, on_gap=print)
    worker.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        shared = str(directory) if carrier in (SHARED_MEMORY, CUDA_IPC) else ""
        device = DEVICE if carrier == CUDA_IPC else CPU
        stub, nobody_asks = rpc.DraftingStub(channel), cast(Requests, SimpleNamespace(unanswered=set()))
        follower = Follower(stub, pb.Subscription(draft_id="draft"), worker, nobody_asks, shared, device)
        following = asyncio.create_task(follower.run())
        while not follower.following:  # noqa: ASYNC110 - plain data
            await asyncio.sleep(0.01)
        for _ in track(range(rounds + WARM_UP), f"{shape.name}, {carrier}", console=console, transient=True):
            follower.resync([])
            await asyncio.to_thread(drafter.whole.get)
            await asyncio.sleep(PAUSE_SECONDS)
        following.cancel()
    worker.stop()
    if not follower.bytes_received[carrier]:
        raise RuntimeError(f"the rows did not come by {carrier}: {follower.bytes_received}")
    return list(zip(worker.received, drafter.at, strict=True))


class TimedWorker(Worker):
    """Notes when the last message of each round came from the stream."""

    def __init__(self, drafter: Arrivals, wait_seconds: float, on_gap: Callable[[list[str]], object]):
        super().__init__(drafter, wait_seconds, on_gap)  # type: ignore[arg-type]
        self._shape, self._rows = drafter.shape, 0
        self.received: list[int] = []

    def absorb(self, verified: Verified, then: Callable[[], object]) -> None:
        self._rows += len(verified.rows_RND)
        if self._rows % self._shape.rows == 0:
            self.received.append(time.monotonic_ns())
        super().absorb(verified, then)


class Arrivals:
    """In the place of the drafter, on its thread: notes when a round is whole, then compares its bytes."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self._rows = 0
        self.at: list[int] = []
        self.whole: queue.SimpleQueue[int] = queue.SimpleQueue()

    def forget_all(self) -> None:
        pass

    def absorb(self, verified: Verified) -> list[str]:
        rows_RND = verified.rows_RND.to(DEVICE)
        finish()
        now = time.monotonic_ns()
        expected = torch.full_like(rows_RND, len(self.at) % 256)
        if not torch.equal(rows_RND, expected):
            raise RuntimeError(f"round {len(self.at)} arrived with other bytes than were sent")
        self._rows += len(rows_RND)
        if self._rows % self.shape.rows == 0:
            self.at.append(now)
            self.whole.put(now)
        return []


# --- the verifier's side ------------------------------------------------------------------------------------------


class Rounds(rpc.DraftingServicer):
    """Each Resync is answered by the next round."""

    def __init__(self, shape: Shape, directory: Path):
        self._shape, self._directory = shape, directory
        self._rows_RND = shape.tensor()
        self._asked: queue.SimpleQueue[Callable[[Delivery], None]] = queue.SimpleQueue()
        self.sent: list[tuple[int, int]] = []
        threading.Thread(target=self._model_thread, daemon=True).start()

    async def Follow(
        self, messages: AsyncIterator[pb.DraftMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DraftPacket]:
        request = (await anext(messages)).subscription
        await context.send_initial_metadata(())
        ring = None
        if request.host == host_id():
            size, on_gpu = min(MAX_RING_BYTES, 16 * self._shape.bytes), request.gpu and request.gpu == gpu_of(DEVICE)
            try:
                ring = TimedRing(self._directory, size, DEVICE if on_gpu else None)
            except OSError:  # then it does not come by the carrier that is measured, which is noticed
                ring = TimedRing(self._directory, size)
            yield pb.DraftPacket(ring=ring.offer)
        subscriber = Subscriber(asyncio.get_running_loop(), lambda deliver: None, ring)
        reading = asyncio.create_task(self._read(messages, subscriber))
        async for packet in subscriber.packets():
            yield packet
        reading.cancel()

    async def _read(self, messages: AsyncIterator[pb.DraftMessage], subscriber: Subscriber) -> None:
        async for _ in messages:
            self._asked.put(subscriber.deliver)
        subscriber.close()

    def _model_thread(self) -> None:
        with torch.inference_mode():
            while True:
                deliver = self._asked.get()
                self._rows_RND.fill_(len(self.sent) % 256)
                finish()
                spans = [pb.ActivationSpan(sequence_id="a", count=self._shape.rows)]
                began = time.monotonic_ns()
                TimedRing.copied = 0
                deliver(Delivery(spans, Picked(self._rows_RND)))
                self.sent.append((began, TimedRing.copied or time.monotonic_ns()))


class TimedRing(Ring):
    """Notes when it was last written."""

    copied = 0

    def settle(self) -> None:
        super().settle()
        TimedRing.copied = time.monotonic_ns()


async def serve_rounds(shape: Shape, rounds: int, directory: Path) -> None:
    """Print the port; when standard input ends, when each round was sent and copied."""
    server, servicer = new_server(), Rounds(shape, directory)
    rpc.add_DraftingServicer_to_server(servicer, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(servicer.sent), flush=True)
    await server.stop(None)


def table(report: dict[str, Any]) -> Table:
    """Milliseconds, modelled beside measured."""
    shown = Table("round", "carrier", "modelled", "p50", "p99", "copy", "stream", "thread", title="added latency, ms")
    for shape in report["shapes"]:
        for name, cell in shape["carriers"].items():
            parts = [cell["modelled_ms"], cell["ms"]["p50"], cell["ms"]["p99"]]
            parts += [cell[part]["p50"] for part in ("copy_ms", "stream_ms", "thread_ms")]
            size = f"{shape['name']}: {shape['bytes'] / 1e6:.2f} MB"
            shown.add_row(size, name.replace("_", " "), *(f"{value:.2f}" for value in parts))
    return shown


if __name__ == "__main__":
    typer.run(main)
