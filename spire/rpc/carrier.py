"""How numbers in bulk travel between two processes of one host: through rings in shared memory, beside inline bytes.

The verifier makes the rings and names them in the first response of a subscription; the draft opens them. Each is
written once, straight from the tensor, and gRPC carries position and length only (`Ring` and `RingSlice` in
verifier.proto).

- Activations, from the verifier to the draft: a `Ring` and its `RingReader`. Every row counts, so the reader says how
  far it has read, and a full ring blocks nobody: these rows then travel inline.
- q, from the draft to the verifier, past the gateway: an `OverwritingRing` and its reader. A proposal may never be
  verified, so nobody waits for anybody: the newest overwrites the oldest, and the reader sees when that has happened.

Nothing is left behind when either process is killed: the draft removes a file's name as soon as it has opened it, and a
name whose maker died before that is removed by the next who makes a ring in the directory.

Where both run on one GPU, activations never leave it: the ring's bytes are memory of the GPU that both map, and the
header stays on the host. What is not there: rings between two GPUs, and q in a GPU's memory. Nor other systems than
Linux: without a boot id no host can be named, and a draft without a host is sent inline bytes.
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
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb

_HEADER_BYTES = 4096
_TOKEN_BYTES = 16
# Of the header seen as 64-bit integers: everything before this position has been read; everything before that one may
# have been written, or is being written now.
_READ, _WRITTEN = 8, 16
# How many bytes a ring in a GPU's memory has.
_GPU_BYTES = 2
_ALIGNMENT = 64
_NAMES = "spire-*.ring"
# No position gets there: it would take centuries.
_NO_POSITION = 2**63
# What one tensor may take of an overwriting ring: by the time it is overwritten, as many of others have come.
_LARGEST_PART = 4
# An overwriting ring begins at a random multiple of its size.
_FIRST_BITS = 32

# Bytes of the host, or of a GPU.
Memory = memoryview | Tensor


class _Made:
    """The end that makes the memory. It is allocated and faulted in at once: a page's first touch takes microseconds.

    Raises OSError when the directory cannot be written or has not `size` bytes left, or the GPU has none to share.
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
            # The mapping keeps a duplicate of the descriptor, and so the lock: it says that the maker is alive.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without this a full file system would be noticed by SIGBUS.
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + (self.size if on_gpu is None else 0))
            memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory[:_TOKEN_BYTES] = self.offer.token
        self._header, on_host = _parts(memory)
        self._header[_GPU_BYTES] = 0 if on_gpu is None else self.size
        self._bytes: Memory = on_host if on_gpu is None else on_gpu


class _Opened:
    """The end that opens it, which removes the file's name: it can be opened once.

    Raises OSError when there is no such file, or the GPU's memory cannot be opened, and InvalidRequest when it is not
    the offered one.
    """

    def __init__(self, directory: Path, offer: pb.Ring, gpu: torch.device | None = None):
        if Path(offer.name).name != offer.name:
            raise InvalidRequest(f"a ring's name is a file name, {offer.name!r} is none")
        file = own_directory(directory) / offer.name
        with file.open("r+b", buffering=0) as opened:
            least = _HEADER_BYTES if gpu else _HEADER_BYTES + 1
            if opened.read(_TOKEN_BYTES) != offer.token or os.fstat(opened.fileno()).st_size < least:
                raise InvalidRequest(f"{file} is not the ring that the verifier offered: is its directory shared?")
            # Faults come now, not later.
            memory = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            file.unlink()
        self._header, on_host = _parts(memory)
        self._bytes: Memory = _open_gpu(offer, self._header[_GPU_BYTES], gpu) if gpu else on_host
        self.size = len(self._bytes)


class Ring(_Made):
    """The writing end for activations. With `gpu` they are kept in its memory."""

    def __init__(self, directory: Path, size: int, gpu: torch.device | None = None):
        super().__init__(directory, size, gpu)
        # Positions: where the next row goes, and where the unread begin whatever the reader says.
        self._head = self._floor = 0

    @property
    def all_read(self) -> bool:
        """Whether the reader has read everything that was put here."""
        return max(self._floor, self._header[_READ]) >= self._head

    def put(self, rows: Tensor) -> pb.RingSlice:
        """Copy a tensor of any device into the ring. The slice's length is 0 when it does not fit now."""
        there, place = self.claim(rows.shape, rows.dtype)
        if there is not None:
            copy_to(there, rows)
            self.settle()
        return place

    def settle(self) -> None:
        """Wait until what was written is there for the reader: before it is told, and of a GPU only."""
        _wait_for(self._bytes)

    def claim(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor | None, pb.RingSlice]:
        """A tensor in the ring, to be written at once, and where that is: None and a length of 0 if it does not fit.

        `settle` before the reader is told.
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
            # All has been read: begin at the front again, so that whatever the ring can hold fits.
            read = self._floor = self._head = _round_up(self._head, self.size)
        position = _next_place(self._head, length, self.size)
        return position if position + length <= read + self.size else None


class RingReader(_Opened):
    """The reading end for activations. With `gpu`, the one whose memory they are kept in."""

    @property
    def on_gpu(self) -> bool:
        return isinstance(self._bytes, Tensor)

    def rows(self, message: pb.ActivationsResponse) -> Tensor:
        """A message's rows: a view of the ring, good until the slice is released, or a copy of what came inline.

        Raises InvalidRequest for a slice outside the ring, and when length, shape and dtype disagree.
        """
        if not message.slice.length and message.slice.position < _NO_POSITION:
            return from_wire(message.rows)
        return from_wire(message.rows, data=_view(self._bytes, message.slice, _ALIGNMENT))

    def release(self, taken: pb.RingSlice) -> None:
        """The rows of this slice, and of all before it, have been read: the writer may use their memory again."""
        _wait_for(self._bytes)
        self._header[_READ] = taken.position + taken.length


class OverwritingRing(_Opened):
    """The writing end for q."""

    def __init__(self, directory: Path, offer: pb.Ring):
        super().__init__(directory, offer)
        self._head = self._header[_WRITTEN]
        self._claiming = threading.Lock()

    def put(self, numbers: Tensor) -> pb.RingSlice:
        """Copy a tensor of any device over what is oldest. The slice's length is 0 when it is too large."""
        claimed = self.claim(numbers.shape, numbers.dtype)
        if claimed is None:
            return pb.RingSlice()
        there, place = claimed
        copy_to(there, numbers)
        return place

    def claim(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, pb.RingSlice] | None:
        """A tensor in the place of what is oldest, to be written, and where that is; None for one that is too large."""
        length = math.prod(shape) * dtype.itemsize
        if not length or length > self.size // _LARGEST_PART:
            return None
        with self._claiming:
            position = _next_place(self._head, length, self.size)
            # Before the first byte, so that whoever reads what was there cannot miss it.
            self._head = self._header[_WRITTEN] = position + length
        return _tensor_at(self._bytes, position % self.size, shape, dtype), pb.RingSlice(
            position=position, length=length
        )


class OverwritingRingReader(_Made):
    """The reading end for q. Its positions begin anywhere: those of another ring are none of this one's."""

    def __init__(self, directory: Path, size: int):
        super().__init__(directory, size)
        self._first = self._header[_WRITTEN] = secrets.randbits(_FIRST_BITS) * self.size

    def view(self, message: tensor_pb2.Tensor, place: pb.RingSlice, dtype: torch.dtype | None = None) -> Tensor | None:
        """The tensor whose data were put there, where they lie; None if something newer does, or nothing of this ring.

        What is read of it is good if `holds` says so afterwards. Raises InvalidRequest for a slice that reaches around
        the ring's end, and as `from_wire` does.
        """
        if not self.holds(place):
            return None
        return from_wire(message, dtype, _view(self._bytes, place, alignment=1))

    def holds(self, place: pb.RingSlice) -> bool:
        """Whether nothing newer lies where these data were put, and they were put here."""
        written = self._header[_WRITTEN]
        return self._first <= place.position and written - self.size <= place.position <= written - place.length


def _parts(memory: mmap.mmap) -> tuple[memoryview, memoryview]:
    """The header as 64-bit integers, and the ring's bytes."""
    return memoryview(memory)[:_HEADER_BYTES].cast("Q"), memoryview(memory)[_HEADER_BYTES:]


def _next_place(head: int, length: int, size: int) -> int:
    """The first position from `head` on where so many bytes do not go around the ring's end."""
    position = _round_up(head, _ALIGNMENT)
    return _round_up(position, size) if position % size + length > size else position


def _share_gpu(size: int, offer: pb.Ring, gpu: torch.device) -> Tensor:
    """So many bytes of a GPU, which the offer tells of; the token is behind them."""
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


def _wait_for(memory: Memory) -> None:
    if isinstance(memory, Tensor):
        cuda_ipc.wait_for(memory)


def _tensor_at(memory: Memory, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if isinstance(memory, Tensor):
        return memory[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=place).view(tuple(shape))


def _view(memory: Memory, taken: pb.RingSlice, alignment: int) -> Memory:
    """A slice's bytes. Raises InvalidRequest when they do not lie in the ring."""
    place = taken.position % len(memory)
    if taken.position >= _NO_POSITION or place % alignment or place + taken.length > len(memory):
        raise InvalidRequest(
            f"{taken.length} bytes at position {taken.position} do not lie in a ring of {len(memory)} bytes"
        )
    return memory[place : place + taken.length]


def _remove_abandoned(directory: Path) -> None:
    """Remove the names of rings whose makers have died: the kernel dropped their locks."""
    for file in directory.glob(_NAMES):
        with contextlib.suppress(OSError), file.open("rb") as found:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
