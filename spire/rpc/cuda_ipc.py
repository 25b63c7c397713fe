"""GPU memory shared by two processes of one host, through CUDA IPC.

The driver's library is called directly, because torch hands out parts of larger allocations: a process that opened one
could read and change the rest. Does not know: synchronisation. The writer waits for its stream before it announces
data, the reader before it releases them (`Ring`, `RingReader`).
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

_HANDLE_BYTES = 64
# The only flag of cuIpcOpenMemHandle, which is mandatory.
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Bytes:
    """GPU memory that torch uses without a copy. The driver call named `give_back` frees it after the last tensor."""

    def __init__(self, address: int, length: int, device: torch.device, give_back: str):
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
        # Not at exit, when the driver frees everything.
        weakref.finalize(self, _give_back, address, device, give_back).atexit = False


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes; empty if `device` is not a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def share(length: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Allocate `length` bytes of GPU memory, and return them with the handle that `opened` takes. Raises OSError."""
    with _calling(device):
        address, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
        memory = _tensor(_Bytes(address.value, length, device, "cuMemFree_v2"), device)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return memory, bytes(handle)


def opened(handle: bytes, length: int, device: torch.device) -> Tensor:
    """Map GPU memory that another process has shared, and return its bytes as a tensor. Raises OSError."""
    if len(handle) != _HANDLE_BYTES:
        raise OSError(f"a handle of GPU memory has {_HANDLE_BYTES} bytes, {len(handle)} came")
    with _calling(device):
        address, theirs = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _tensor(_Bytes(address.value, length, device, "cuIpcCloseMemHandle"), device)


def wait_for(memory: Tensor) -> None:
    """Wait until the calling thread's current CUDA stream on the GPU of `memory` has finished."""
    torch.cuda.current_stream(memory.device).synchronize()


@contextlib.contextmanager
def _calling(device: torch.device) -> Iterator[None]:
    """Enter a CUDA context on `device` in the calling thread, and convert CUDA errors into OSError."""
    try:
        with torch.cuda.device(device):
            # Of this stream alone: to wait for the whole GPU would spoil a graph that another thread records.
            torch.cuda.current_stream().synchronize()
            yield
    except (RuntimeError, AttributeError) as error:
        raise OSError(f"CUDA: {error}") from error


def _tensor(memory: _Bytes, device: torch.device) -> Tensor:
    return torch.as_tensor(memory, device=device)


def _give_back(address: int, device: torch.device, how: str) -> None:
    with contextlib.suppress(OSError), _calling(device):
        _call(how, ctypes.c_uint64(address))


def _call(name: str, *arguments: object) -> None:
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        error = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(error))
        raise OSError(f"{name}: {(error.value or b'error').decode()} ({code})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
