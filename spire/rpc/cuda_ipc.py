"""Memory of one GPU that two processes of a host map both: CUDA's inter-process communication.

Through the driver's own library, which every host with a GPU has, because torch gives out parts of larger allocations:
whoever opened one could see, and change, what else lies there. What is not here: telling when something that was
written is there. Who writes waits for its stream before it says so, and who has read for its own (`Ring`).
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
# Of cuIpcOpenMemHandle: the only flag there is, and it must be given.
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Bytes:
    """Memory as torch sees it without a copy; given back by `give_back` once no tensor is left of it."""

    def __init__(self, address: int, length: int, device: torch.device, give_back: str):
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
        # Not at the process's end, which gives back everything.
        weakref.finalize(self, _give_back, address, device, give_back).atexit = False


def gpu_of(device: torch.device) -> str:
    """Which GPU that is, by the name that all processes have for it; empty where it is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def share(length: int, device: torch.device) -> tuple[Tensor, bytes]:
    """So many bytes of a GPU, an allocation of their own, and the handle that others open them by. Raises OSError."""
    with _calling(device):
        address, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
        memory = _tensor(_Bytes(address.value, length, device, "cuMemFree_v2"), device)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return memory, bytes(handle)


def opened(handle: bytes, length: int, device: torch.device) -> Tensor:
    """The bytes that another process shares of this GPU. Raises OSError."""
    if len(handle) != _HANDLE_BYTES:
        raise OSError(f"a handle of GPU memory has {_HANDLE_BYTES} bytes, {len(handle)} came")
    with _calling(device):
        address, theirs = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _tensor(_Bytes(address.value, length, device, "cuIpcCloseMemHandle"), device)


def wait_for(memory: Tensor) -> None:
    """Until what this thread has asked to be read and written on this memory's GPU is done."""
    torch.cuda.current_stream(memory.device).synchronize()


@contextlib.contextmanager
def _calling(device: torch.device) -> Iterator[None]:
    """With this the calling thread has a context on that device. Whatever CUDA says is an OSError."""
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
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
