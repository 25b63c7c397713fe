"""Rows of one GPU stay on it where both processes can map its memory, and come otherwise where they cannot.

What needs no GPU runs without one: then memory of this process stands for the GPU's, and a small library for CUDA's.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

import draft_service.follower as following_side
import verifier_service.serve.draft_connections as offering_side
from draft_service.drafter import Drafter
from draft_service.replies import Replies
from spire.decoding.drafting import Drafted
from spire.errors import InvalidRequest
from spire.rpc import cuda_ipc
from spire.rpc.carrier import CUDA_IPC, INLINE, SHARED_MEMORY, OverwritingRing, OverwritingRingReader, Ring, RingReader
from spire.rpc.tensors import without_data
from spire.v1 import draft_pb2, verifier_pb2 as pb
from tests.draft_service.conftest import eventually
from tests.draft_service.harness import Following, following
from tests.draft_service.test_requests import DEPTH, carriers, texts
from tests.paths import ROOT
from tests.spire.rpc.test_carrier import PAGE, message, rows_of
from verifier_service.feed.delivery import Picked

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# What `cuda_ipc` calls of the driver. A handle is the base's address, between marks that must come back unharmed.
DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned char reserved[64]; } Handle;
static int used, opened;
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    if (size > 1 << 20) return 2;
    *address = (uint64_t)malloc(size); used++;
    return 0;
}
int cuMemFree_v2(uint64_t address) { free((void *)address); used--; return 0; }
int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    memset(handle, 0, sizeof *handle);
    handle->reserved[0] = 7; handle->reserved[63] = 9;
    memcpy(handle->reserved + 8, &address, 8);
    return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    if (flags != 1 || handle.reserved[0] != 7 || handle.reserved[63] != 9) return 1;
    memcpy(address, handle.reserved + 8, 8);
    opened++;
    return 0;
}
int cuIpcCloseMemHandle(uint64_t address) { opened--; return 0; }
int in_use(void) { return used; }
int mapped(void) { return opened; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE"; return 0;
}
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Tensor]:
    """Both services run on one GPU, whose shared memory this is, by handle."""
    memory: dict[bytes, Tensor] = {}

    def share(length: int, device: torch.device) -> tuple[Tensor, bytes]:
        handle = bytes([len(memory)]) * 64
        memory[handle] = torch.zeros(length, dtype=torch.uint8)
        return memory[handle], handle

    for name, stands_for in {
        "share": share,
        "opened": lambda handle, length, device: memory[handle][:length],
        "wait_for": lambda memory: None,
    }.items():
        monkeypatch.setattr(cuda_ipc, name, stands_for)
    for side in (following_side, offering_side):
        monkeypatch.setattr(side, "gpu_of", lambda device: "GPU-1")
    return memory


def carried(both: Following) -> set[str]:
    return {name for name, count in both.follower.bytes_received.items() if count}


def q_carriers(both: Following) -> set[str]:
    return {name for name, count in both.requests.replies.q_bytes.items() if count}


def names(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_on_one_gpu_rows_stay_there_and_the_text_is_that_of_shared_memory(
    pair: tuple[Path, Path], tmp_path: Path, gpu: dict[bytes, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, carrier in (("GPU-1", CUDA_IPC), ("GPU-2", SHARED_MEMORY)):
        monkeypatch.setattr(following_side, "gpu_of", lambda device, name=name: name)
        async with following(pair, tmp_path) as both:
            found.append(texts(await decoded(both, 10)))
            assert carriers(both) == q_carriers(both) == {carrier}
        assert not names(tmp_path), "no name stays behind"
    assert found[0] == found[1]
    assert {drafted for drafted, _ in found[0]} == {DEPTH}
    assert len(gpu) == 2, "a ring of activations and one of q; who runs on another GPU is offered none of this one's"


async def decoded(both: Following, rounds: int) -> list[pb.VerifyResult]:
    await both.start("a", [1, 2, 3, 4, 5])
    return await both.decode("a", rounds, DEPTH)


def other_memory(gpu: dict[bytes, Tensor]) -> Callable[..., Tensor]:
    return lambda handle, length, device: torch.zeros(length, dtype=torch.uint8)


def none(*_: object) -> Tensor:
    raise OSError("cuIpcOpenMemHandle_v2: CUDA_ERROR_MAP_FAILED (205)")


@pytest.mark.parametrize("opened", [pytest.param(lambda gpu: none, id="none"), pytest.param(other_memory, id="other")])
async def test_a_draft_that_cannot_open_the_gpus_memory_asks_for_the_hosts(
    pair: tuple[Path, Path],
    tmp_path: Path,
    gpu: dict[bytes, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    opened: Callable[[dict[bytes, Tensor]], Callable[..., Tensor]],
) -> None:
    monkeypatch.setattr(cuda_ipc, "opened", opened(gpu))
    async with following(pair, tmp_path) as both:

        async def subscribed_again() -> bool:
            return both.follower.subscriptions == 2 and both.follower.following

        assert await eventually(subscribed_again)
        assert {result.drafted for result in await decoded(both, 3)} == {DEPTH}
        assert carriers(both) == {SHARED_MEMORY}
        assert len(gpu) == 2
        assert not names(tmp_path), "no name stays behind"


async def test_a_verifier_that_cannot_share_the_gpus_memory_offers_the_hosts(
    pair: tuple[Path, Path], tmp_path: Path, gpu: dict[bytes, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "share", none)
    async with following(pair, tmp_path) as both:
        assert {result.drafted for result in await decoded(both, 3)} == {DEPTH}
        assert carriers(both) == {SHARED_MEMORY}
        assert both.follower.subscriptions == 1


async def test_without_a_shared_directory_rows_of_a_gpu_come_inline(
    pair: tuple[Path, Path], tmp_path: Path, gpu: dict[bytes, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_side, "host_id", lambda: "another host")
    async with following(pair, tmp_path) as both:
        assert {result.drafted for result in await decoded(both, 3)} == {DEPTH}
        assert carriers(both) == {INLINE}
        assert not gpu


def test_rows_are_waited_for_before_announcement_and_before_release(
    tmp_path: Path, gpu: dict[bytes, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(tmp_path, PAGE, CPU)
    reader = RingReader(tmp_path, ring.offer, CPU)
    waited: list[int] = []
    monkeypatch.setattr(cuda_ipc, "wait_for", lambda memory: waited.append(len(waited)))
    came = message(ring, rows_of(3, 0))
    assert (came.slice.length, len(waited)) == (3 * 192, 1)
    assert torch.equal(reader.rows(came), rows_of(3, 0))
    reader.release(came.slice)
    assert len(waited) == 2
    assert message(ring, rows_of(PAGE // 192, 1)).slice.length, "all of it is free again"
    assert not message(ring, rows_of(1, 2)).slice.length, "and what does not fit travels inline"


def test_q_in_the_gpus_memory_is_waited_for_before_the_reply(
    tmp_path: Path, gpu: dict[bytes, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = OverwritingRingReader(tmp_path, PAGE, CPU)
    ring = OverwritingRing(tmp_path, reader.offer, CPU)
    waited: list[int] = []
    monkeypatch.setattr(cuda_ipc, "wait_for", lambda memory: waited.append(len(waited)))
    drafter = SimpleNamespace(q_ring=lambda: ring, draft=SimpleNamespace(config=SimpleNamespace(vocab_size=9)))
    probs_BKM = torch.rand(2, 3, 9)
    q = Replies(cast(Drafter, drafter))._placed(Drafted(torch.zeros(2, 3), None, probs_BKM))
    assert len(waited) == 1
    assert q is not None
    assert q.of_probs is not None
    place = q.of_probs
    found = reader.view(without_data(probs_BKM), place)
    assert found is not None
    assert torch.equal(found, probs_BKM)
    assert reader.holds(place)
    put_all_over = [ring.put(torch.zeros(PAGE // 4, dtype=torch.uint8)) for _ in range(8)]
    assert all(each.length for each in put_all_over)
    assert not reader.holds(place)


def test_a_slice_at_an_odd_address_of_the_gpus_memory_is_refused(tmp_path: Path, gpu: dict[bytes, Tensor]) -> None:
    """A GPU that reads a number there is lost."""
    reader = OverwritingRingReader(tmp_path, PAGE, CPU)
    ring = OverwritingRing(tmp_path, reader.offer, CPU)
    place = ring.put(torch.rand(4, 4))
    place.position += 2
    with pytest.raises(InvalidRequest, match=r"no tensor of torch\.float32"):
        reader.view(without_data(torch.rand(3, 4)), pb.RingSlice(position=place.position, length=48))


def test_a_slice_around_the_end_of_the_gpus_memory_is_refused(tmp_path: Path, gpu: dict[bytes, Tensor]) -> None:
    ring = Ring(tmp_path, PAGE, CPU)
    reader = RingReader(tmp_path, ring.offer, CPU)
    came = message(ring, rows_of(3, 0))
    came.slice.position = PAGE - 64
    with pytest.raises(InvalidRequest, match="do not lie in a ring"):
        reader.rows(came)
    came.slice.position, came.slice.length = 0, 192
    with pytest.raises(InvalidRequest, match="needs 576 bytes, 192 came"):
        reader.rows(came)


# --- the driver's calls -------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """In the place of libcuda: the same functions, called in the same way."""
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: loaded)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))

    def tensor(memory: cuda_ipc._Bytes, device: torch.device) -> Tensor:
        """Of the host's memory, as torch makes one of a GPU's: it holds what says where that is."""
        interface = memory.__cuda_array_interface__
        (address, _), (length,) = interface["data"], interface["shape"]
        held = (ctypes.c_ubyte * length).from_address(address)
        held.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(held, dtype=torch.uint8)

    monkeypatch.setattr(cuda_ipc, "_tensor", tensor)
    return loaded


def test_memory_is_its_own_allocation_and_is_freed_after_its_last_use(driver: ctypes.CDLL) -> None:
    memory, handle = cuda_ipc.share(200, CPU)
    memory[:] = torch.arange(200, dtype=torch.uint8)
    theirs = cuda_ipc.opened(handle, 200, CPU)
    assert torch.equal(theirs, torch.arange(200, dtype=torch.uint8))
    part = theirs[100:]
    del theirs
    assert (driver.in_use(), driver.mapped()) == (1, 1)
    assert part[0] == 100
    del part
    assert (driver.in_use(), driver.mapped()) == (1, 0)
    del memory
    assert driver.in_use() == 0


def test_what_the_driver_refuses_is_said_by_its_name(driver: ctypes.CDLL) -> None:
    with pytest.raises(OSError, match=r"^cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE \(1\)$"):
        cuda_ipc.opened(b"\0" * 64, 1, CPU)
    with pytest.raises(OSError, match=r"^cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(2\)$"):
        cuda_ipc.share(1 << 30, CPU)
    with pytest.raises(OSError, match="has 64 bytes, 3 came"):
        cuda_ipc.opened(b"abc", 1, CPU)


def test_whatever_else_cuda_says_is_no_more_than_memory_that_cannot_be_had(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=broken))
    for call in (lambda: cuda_ipc.share(1, CPU), lambda: cuda_ipc.opened(b"\0" * 64, 1, CPU)):
        with pytest.raises(OSError, match="illegal memory access"):
            call()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: ctypes.CDLL(None))
    with pytest.raises(OSError, match="cuMemAlloc_v2"):
        cuda_ipc.share(1, CPU)


def test_a_host_has_no_gpus_name() -> None:
    assert cuda_ipc.gpu_of(CPU) == ""


# --- on a GPU -----------------------------------------------------------------------------------------------------

READER = """
import sys, torch
from pathlib import Path
from spire.rpc.carrier import RingReader
from spire.v1 import draft_pb2, verifier_pb2 as pb
device = torch.device("cuda:0")
reader = RingReader(Path(sys.argv[1]), pb.Ring.FromString(bytes.fromhex(input())), device)
print("open", flush=True)
while True:
    came = draft_pb2.DraftPacket.FromString(bytes.fromhex(input()))
    rows = reader.rows(came)
    assert rows.is_cuda
    print(rows.double().sum().item(), flush=True)
    reader.release(came.slice)
"""


@pytest.mark.gpu
@needs_gpu
def test_another_process_reads_what_was_gathered_on_the_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    ring = Ring(tmp_path, 1024 * 1024, device)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def say(packet: bytes) -> str:
            assert reader.stdin is not None
            assert reader.stdout is not None
            print(packet.hex(), file=reader.stdin, flush=True)
            return reader.stdout.readline().strip()

        assert say(ring.offer.SerializeToString()) == "open"
        for seed in range(50):
            taps = torch.randn(400, 2, 256, device=device).bfloat16()
            rows = Picked(taps, list(range(seed, 400, 3)))
            there, place = ring.claim(rows.shape, rows.dtype)
            assert there is not None
            rows.gather(there)
            ring.settle()
            came = draft_pb2.DraftPacket(slice=place)
            came.rows.shape.extend(rows.shape)
            came.rows.dtype = 2
            assert float(say(came.SerializeToString())) == taps[seed::3].double().sum().item()
        reader.kill()


@pytest.mark.gpu
@needs_gpu
def test_the_benchmark_carries_every_byte_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    script = importlib.import_module("carrier")
    found = script.measure(script.SHAPES[-1], CUDA_IPC, 3, tmp_path, 1)
    assert 0 < found["ms"]["p50"] <= found["ms"]["p99"]
