"""Ring buffers in shared memory, which carry activations and q between verifier and draft on one host.

The verifier creates the rings and names them in the first packet to a draft; the draft opens them. A tensor is
copied into a ring once, and gRPC carries its position and length only (`Ring` and `RingSlice` in verifier.proto).

- Activations, from the verifier to the draft: `Ring` and `RingReader`. Every row is needed, so the reader publishes how
  far it has read. A full ring does not block: the rows then travel inline.
- q, from the draft to the verifier: `OverwritingRing` and `OverwritingRingReader`. A draft reply may never be verified,
  so neither side waits: the newest q overwrites the oldest, and the reader detects overwritten data.

Killed processes leave no files behind: the draft unlinks a ring's file as soon as it has opened the file, and the next
ring created in the directory removes the files whose creators have died.

If both services run on one GPU, the bytes of both rings are GPU memory that both map; the headers stay on the host.
Does not know: rings between two GPUs, and systems other than Linux (without a boot id the draft has no host id, and
data travel inline).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from spire.errors import InvalidRequest
from spire.rpc import cuda_ipc
from spire.rpc.host import own_directory
from spire.rpc.tensors import copy_to, from_wire
from spire.v1 import draft_pb2, tensor_pb2, verifier_pb2 as pb

_HEADER_BYTES = 4096
_TOKEN_BYTES = 16
# Indices into the header as 64-bit integers. _READ: all before this position has been read. _WRITTEN: all before this
# position has been written or is being written.
_READ, _WRITTEN = 8, 16
# Index of the size in bytes of a ring in GPU memory.
_GPU_BYTES = 2
_ALIGNMENT = 64
_NAMES = "spire-*.ring"
# Positions stay below this, which would take centuries to reach.
_NO_POSITION = 2**63
# One tensor may take 1/_LARGEST_PART of an overwriting ring, so that many more are written before it is overwritten.
_LARGEST_PART = 4
# The first position of an overwriting ring is its size times a random number of this many bits.
_FIRST_BITS = 32

# By what tensors travel between verifier and draft: within messages, in memory of the host, in memory of the GPU.
CARRIERS = INLINE, SHARED_MEMORY, CUDA_IPC = "inline", "shared_memory", "cuda_ipc"

# Bytes on the host or on a GPU.
Memory = memoryview | Tensor


class _End:
    """One end of a ring buffer. `settle` and `carrier` are common to all."""

    _bytes: Memory

    @property
    def gpu_memory(self) -> Tensor | None:
        """The bytes of a ring in GPU memory; None for memory of the host."""
        return self._bytes if isinstance(self._bytes, Tensor) else None

    @property
    def carrier(self) -> str:
        return SHARED_MEMORY if self.gpu_memory is None else CUDA_IPC

    def settle(self) -> None:
        """Wait until the GPU has done what was asked of it: call after writing and before notifying the other end.

        Host memory needs no wait.
        """
        if self.gpu_memory is not None:
            cuda_ipc.wait_for(self.gpu_memory)


class _Made(_End):
    """One end of a ring buffer, which creates its memory and faults in all pages: the first access to a page is slow.

    Raises OSError if the directory cannot be written or lacks `size` free bytes, or the GPU cannot share memory.
    """

    def __init__(self, directory: Path, size: int, gpu: torch.device | None = None):
        directory = own_directory(directory)
        _remove_abandoned(directory)
        self.size = _round_up(size, _HEADER_BYTES)
        self.offer = pb.Ring(name=_NAMES.replace("*", secrets.token_hex(16)), token=secrets.token_bytes(_TOKEN_BYTES))
        on_gpu = _share_gpu(self.size, self.offer, gpu) if gpu else None
        file = directory / self.offer.name
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        weakref.finalize(self, file.unlink, missing_ok=True)
        with os.fdopen(descriptor, "r+b", buffering=0):
            # The lock shows that the maker is alive. The mapping duplicates the descriptor, which keeps the lock.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without this a full file system would show as SIGBUS.
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + (self.size if on_gpu is None else 0))
            memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory[:_TOKEN_BYTES] = self.offer.token
        self._header, on_host = _parts(memory)
        self._header[_GPU_BYTES] = 0 if on_gpu is None else self.size
        self._bytes = on_host if on_gpu is None else on_gpu


class _Opened(_End):
    """One end of a ring buffer, which opens the other end's memory. The file is unlinked: a ring can be opened once.

    Raises OSError if there is no such file or the GPU memory cannot be opened, and InvalidRequest if the file or the
    GPU memory is not the offered one.
    """

    def __init__(self, directory: Path, offer: pb.Ring, gpu: torch.device | None = None):
        if Path(offer.name).name != offer.name:
            raise InvalidRequest(f"a ring's name is a file name, {offer.name!r} is none")
        file = own_directory(directory) / offer.name
        with file.open("r+b", buffering=0) as opened:
            least = _HEADER_BYTES if gpu else _HEADER_BYTES + 1
            if opened.read(_TOKEN_BYTES) != offer.token or os.fstat(opened.fileno()).st_size < least:
                raise InvalidRequest(f"{file} is not the ring that the verifier offered: is its directory shared?")
            # MAP_POPULATE takes the page faults now, not later.
            memory = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            file.unlink()
        self._header, on_host = _parts(memory)
        self._bytes = _open_gpu(offer, self._header[_GPU_BYTES], gpu) if gpu else on_host
        self.size = len(self._bytes)


class Ring(_Made):
    """The writing end of a ring buffer for activations, which lies in GPU memory if `gpu` is given."""

    def __init__(self, directory: Path, size: int, gpu: torch.device | None = None):
        super().__init__(directory, size, gpu)
        # _head: position of the next row. _floor: all data before this position have been read, whatever _READ is.
        self._head = self._floor = 0

    def claim(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor | None, pb.RingSlice]:
        """Reserve space. Return a tensor to fill at once and its slice; if the ring is full, None and an empty slice.

        Call `settle` after writing and before notifying the reader.
        """
        length = math.prod(shape) * dtype.itemsize
        position = self._place(length)
        if position is None or not length:
            return None, pb.RingSlice(position=self._head)
        self._head = position + length
        there = _tensor_at(self._bytes, position % self.size, shape, dtype)
        return there, pb.RingSlice(position=position, length=length)

    def _place(self, length: int) -> int | None:
        read = max(self._floor, min(self._header[_READ], self._head))
        if read == self._head:
            # The ring is empty: start again at the front, so that any tensor up to the ring's size fits.
            read = self._floor = self._head = _round_up(self._head, self.size)
        position = _next_place(self._head, length, self.size)
        return position if position + length <= read + self.size else None


class RingReader(_Opened):
    """The reading end of a ring buffer for activations. `gpu` is the GPU whose memory holds the ring, if any."""

    def rows(self, packet: draft_pb2.DraftPacket) -> Tensor:
        """Return the activations of a packet: a view of the ring, valid until `release`, or a copy of inline bytes.

        Raises InvalidRequest for a slice outside the ring, and if length, shape and dtype disagree.
        """
        if not packet.slice.length and packet.slice.position < _NO_POSITION:
            return from_wire(packet.rows)
        return from_wire(packet.rows, data=_view(self._bytes, packet.slice, _ALIGNMENT))

    def release(self, taken: pb.RingSlice) -> None:
        """Mark the slice `taken` and all earlier slices as read, so that the writer may reuse their memory."""
        self.settle()
        self._header[_READ] = taken.position + taken.length


class OverwritingRing(_Opened):
    """The writing end of a ring buffer for q, which overwrites the oldest data. `put` and `claim` are thread-safe.

    `gpu` is the GPU whose memory holds the ring, if any.
    """

    def __init__(self, directory: Path, offer: pb.Ring, gpu: torch.device | None = None):
        super().__init__(directory, offer, gpu)
        self._head = self._header[_WRITTEN]
        self._claiming = threading.Lock()

    def put(self, numbers: Tensor) -> pb.RingSlice:
        """Copy a tensor of any device over the oldest data. Return its slice: length 0 if the tensor is too large.

        Call `settle` before notifying the reader.
        """
        claimed = self.claim(numbers.shape, numbers.dtype)
        if claimed is None:
            return pb.RingSlice()
        there, place = claimed
        copy_to(there, numbers)
        return place

    def claim(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, pb.RingSlice] | None:
        """Reserve the oldest data's memory. Return a tensor to fill and its slice; None if `shape` is too large."""
        length = math.prod(shape) * dtype.itemsize
        if not length or length > self.size // _LARGEST_PART:
            return None
        with self._claiming:
            position = _next_place(self._head, length, self.size)
            # Published before the first byte is written, so that a reader of the old data cannot miss the change.
            self._head = self._header[_WRITTEN] = position + length
        there = _tensor_at(self._bytes, position % self.size, shape, dtype)
        return there, pb.RingSlice(position=position, length=length)


class OverwritingRingReader(_Made):
    """The reading end of a ring buffer for q, which lies in GPU memory if `gpu` is given.

    The ring's first position is random, to detect slices of other rings.
    """

    def __init__(self, directory: Path, size: int, gpu: torch.device | None = None):
        super().__init__(directory, size, gpu)
        self._first = self._header[_WRITTEN] = secrets.randbits(_FIRST_BITS) * self.size

    def view(self, message: tensor_pb2.Tensor, place: pb.RingSlice, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return a view of the tensor in the slice `place`; None if the slice is overwritten or of another ring.

        Data read from the view are valid only if `holds` is still true afterwards, which on a GPU means: after the
        reading kernel has ended. Raises InvalidRequest for a slice that crosses the ring's end, and if bytes, shape and
        dtype disagree.
        """
        if not self.holds(place):
            return None
        return from_wire(message, dtype, _view(self._bytes, place, alignment=1))

    def holds(self, place: pb.RingSlice) -> bool:
        """True if the data in the slice `place` were written to this ring and have not been overwritten."""
        written = self._header[_WRITTEN]
        return self._first <= place.position and written - self.size <= place.position <= written - place.length


def _parts(memory: mmap.mmap) -> tuple[memoryview, memoryview]:
    """Return the header as 64-bit integers, and the ring's bytes."""
    return memoryview(memory)[:_HEADER_BYTES].cast("Q"), memoryview(memory)[_HEADER_BYTES:]


def _next_place(head: int, length: int, size: int) -> int:
    """Return the first aligned position at or after `head` at which `length` bytes do not cross the ring's end."""
    position = _round_up(head, _ALIGNMENT)
    return _round_up(position, size) if position % size + length > size else position


def _share_gpu(size: int, offer: pb.Ring, gpu: torch.device) -> Tensor:
    """Allocate `size` bytes on a GPU, followed by the token, and put their handle into the offer."""
    memory, offer.gpu_handle = cuda_ipc.share(size + _TOKEN_BYTES, gpu)
    try:
        memory[size:] = torch.tensor(list(offer.token), dtype=torch.uint8)
        cuda_ipc.wait_for(memory)
    except RuntimeError as error:
        raise OSError(f"memory of the GPU cannot be written: {error}") from error
    return memory[:size]


def _open_gpu(offer: pb.Ring, size: int, gpu: torch.device) -> Tensor:
    memory = cuda_ipc.opened(offer.gpu_handle, size + _TOKEN_BYTES, gpu)
    try:
        token = bytes(memory[size:].tolist())
    except RuntimeError as error:
        raise OSError(f"memory of the GPU cannot be read: {error}") from error
    if token != offer.token:
        raise InvalidRequest("the memory of the GPU that was opened is not what the verifier offered")
    return memory[:size]


def _tensor_at(memory: Memory, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if isinstance(memory, Tensor):
        return memory[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=place).view(tuple(shape))


def _view(memory: Memory, taken: pb.RingSlice, alignment: int) -> Memory:
    """Return the bytes of a slice. Raises InvalidRequest if the slice does not lie in the ring."""
    size, place = len(memory), taken.position % len(memory)
    if taken.position >= _NO_POSITION or place % alignment or place + taken.length > size:
        raise InvalidRequest(f"{taken.length} bytes at position {taken.position} do not lie in a ring of {size} bytes")
    return memory[place : place + taken.length]


def _remove_abandoned(directory: Path) -> None:
    """Remove the files of rings whose creators have died, recognised by their released locks."""
    for file in directory.glob(_NAMES):
        with contextlib.suppress(OSError), file.open("rb") as found:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
