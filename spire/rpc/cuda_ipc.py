"""Memory of one GPU that two processes of a host map both: CUDA's inter-process communication.

Through the driver's own library, which every host with a GPU has. What it does not do is to tell when something that
was written is there: who writes waits for its stream before it says so, and who has read for its own (`Ring`).
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache

import torch
from torch import Tensor

from spire.v1 import verifier_pb2 as pb

_HANDLE_BYTES = 64
# Of cuIpcOpenMemHandle: the only flag there is, and it must be given.
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Mapped:
    """Another process's memory, for torch to see without a copy; unmapped once no tensor is left that does."""

    def __init__(self, base: int, offset: int, length: int, device: torch.device):
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (base + offset, False),
            "strides": None,
            "version": 2,
        }
        # Not at the process's end, which unmaps everything.
        weakref.finalize(self, _unmap, base, device).atexit = False


def gpu_of(device: torch.device) -> str:
    """Which GPU that is, by the name that all processes have for it; empty where it is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def share(memory: Tensor) -> pb.GpuMemory:
    """What another process opens this memory by; everything written to it is there. Raises OSError."""
    with torch.cuda.device(memory.device):
        torch.cuda.synchronize()  # with this the thread has a context, too
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        place = ctypes.c_uint64(memory.data_ptr())
        # A handle is of a whole allocation, of which torch gives out parts.
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), place)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return pb.GpuMemory(handle=bytes(handle), offset=memory.data_ptr() - base.value, length=memory.nbytes)


def opened(shared: pb.GpuMemory, device: torch.device) -> Tensor:
    """The bytes of memory of this GPU that another process shares. Raises OSError."""
    if len(shared.handle) != _HANDLE_BYTES:
        raise OSError(f"a handle of GPU memory has {_HANDLE_BYTES} bytes, {len(shared.handle)} came")
    base = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        handle = _Handle.from_buffer_copy(shared.handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    mapped = _Mapped(base.value, shared.offset, shared.length, device)
    return torch.as_tensor(mapped, device=device)


def wait_for(memory: Tensor) -> None:
    """Until what this thread has asked to be read and written on this memory's GPU is done."""
    torch.cuda.current_stream(memory.device).synchronize()


def _unmap(base: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def _call(name: str, *arguments: object) -> None:
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        error = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(error))
        raise OSError(f"{name}: {(error.value or b'error').decode()} ({code})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
