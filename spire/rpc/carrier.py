"""How rows of activations travel between two processes of one host: a ring in shared memory, beside inline bytes.

The verifier makes a `Ring`, names it in the first response of a subscription, and copies rows into it once, straight
from the tensor. The draft opens it as a `RingReader`: rows are a view of the memory, released when they have been
absorbed. gRPC carries position and length only (`Ring` and `RingSlice` in verifier.proto). A full ring blocks nobody:
these rows then travel inline.

Nothing is left behind when either process is killed: the reader removes the file's name as soon as it has opened it,
and a name whose maker died before that is removed by the next who makes a ring in the directory.

What is not there: CUDA IPC. Rows of a GPU are copied to the ring in the host's memory, and a draft on a GPU copies them
from there. Device memory that both processes map would be another pair of these two classes. Nor other systems than
Linux: without a boot id `host_id` is empty, and a draft without a host is sent inline bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path

import torch
from torch import Tensor

from spire.errors import InvalidRequest
from spire.rpc.tensors import from_wire
from spire.v1 import verifier_pb2 as pb

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HEADER_BYTES = 4096
_TOKEN_BYTES = 16
# Of the header seen as 64-bit integers: everything before this position has been read.
_READ = 8
_ALIGNMENT = 64
_NAMES = "spire-*.ring"


def host_id() -> str:
    """What all processes of a running kernel have in common, in containers too. Empty where it cannot be told."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Ring:
    """The writing end. Its memory is allocated and faulted in at once: the first touch of a page takes microseconds.

    Raises OSError when the directory cannot be written or has not `size` bytes left.
    """

    def __init__(self, directory: Path, size: int):
        _remove_abandoned(directory)
        self.size = _round_up(size, _HEADER_BYTES)
        self.offer = pb.Ring(name=_NAMES.replace("*", secrets.token_hex(16)), token=secrets.token_bytes(_TOKEN_BYTES))
        file = directory / self.offer.name
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        weakref.finalize(self, file.unlink, missing_ok=True)
        with os.fdopen(descriptor, "r+b", buffering=0):
            # The mapping keeps a duplicate of the descriptor, and so the lock: it says that the maker is alive.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without this a full file system would be noticed by SIGBUS.
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + self.size)
            memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory[:_TOKEN_BYTES] = self.offer.token
        self._header = memoryview(memory)[:_HEADER_BYTES].cast("Q")
        self._bytes_S = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES)
        # Positions: where the next row goes, and where the unread begin whatever the reader says.
        self._head = self._floor = 0

    def put(self, rows: Tensor) -> pb.RingSlice:
        """Copy a tensor of any device into the ring. The slice's length is 0 when it does not fit now."""
        position = self._place(rows.nbytes)
        if position is None or not rows.nbytes:
            return pb.RingSlice(position=self._head)
        place, self._head = position % self.size, position + rows.nbytes
        self._bytes_S[place : place + rows.nbytes].view(rows.dtype).view(rows.shape).copy_(rows)
        return pb.RingSlice(position=position, length=rows.nbytes)

    def _place(self, length: int) -> int | None:
        read = max(self._floor, min(self._header[_READ], self._head))
        if read == self._head:
            # All has been read: begin at the front again, so that whatever the ring can hold fits.
            read = self._floor = self._head = _round_up(self._head, self.size)
        position = _round_up(self._head, _ALIGNMENT)
        if position % self.size + length > self.size:
            position = _round_up(position, self.size)
        return position if position + length <= read + self.size else None


class RingReader:
    """The reading end. Opening it removes the file's name, so it can be opened once.

    Raises OSError when there is no such file, and InvalidRequest when it is not the offered one.
    """

    def __init__(self, directory: Path, offer: pb.Ring):
        if Path(offer.name).name != offer.name:
            raise InvalidRequest(f"a ring's name is a file name, {offer.name!r} is none")
        file = directory / offer.name
        with file.open("r+b", buffering=0) as opened:
            if opened.read(_TOKEN_BYTES) != offer.token or os.fstat(opened.fileno()).st_size <= _HEADER_BYTES:
                raise InvalidRequest(f"{file} is not the ring that the verifier offered: is its directory shared?")
            self._memory = memoryview(
                mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # faults come now, not later
            )
            file.unlink()
        self._header = self._memory[:_HEADER_BYTES].cast("Q")
        self._bytes = self._memory[_HEADER_BYTES:]

    def rows(self, message: pb.ActivationsResponse) -> Tensor:
        """A message's rows: a view of the ring, good until the slice is released, or a copy of what came inline.

        Raises InvalidRequest for a slice outside the ring, and when length, shape and dtype disagree.
        """
        position, length = message.slice.position, message.slice.length
        place = position % len(self._bytes)
        if position >= 2**63 or (length and (place % _ALIGNMENT or place + length > len(self._bytes))):
            raise InvalidRequest(
                f"rows at position {position}, {length} bytes long, do not lie in a ring of {len(self._bytes)} bytes"
            )
        return from_wire(message.rows, data=self._bytes[place : place + length]) if length else from_wire(message.rows)

    def release(self, taken: pb.RingSlice) -> None:
        """The rows of this slice, and of all before it, have been read: the writer may use their memory again."""
        self._header[_READ] = taken.position + taken.length


def _remove_abandoned(directory: Path) -> None:
    """Remove the names of rings whose makers have died: the kernel dropped their locks."""
    for file in directory.glob(_NAMES):
        with contextlib.suppress(OSError), file.open("rb") as found:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
