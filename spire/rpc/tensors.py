"""Tensors in messages: raw little-endian bytes, dtype and shape. Imports torch: the gateway must not import this."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spire.errors import InvalidRequest
from spire.v1 import tensor_pb2 as pb

_TO_WIRE = {torch.float32: pb.DTYPE_FLOAT32, torch.bfloat16: pb.DTYPE_BFLOAT16, torch.int32: pb.DTYPE_INT32}
_FROM_WIRE = {wire: dtype for dtype, wire in _TO_WIRE.items()}
# Up to this many bytes, one thread has finished copying before another is woken to help.
_COPIED_ALONE = 512 * 1024


def host_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return a view of a contiguous host tensor as bytes: the last dimension counts bytes instead of elements."""
    return tensor.view(torch.uint8).numpy()


def copy_to(there: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` to the contiguous tensor `there`, between any devices.

    Torch shares larger copies among threads. On a busy host, waking a thread takes longer than a small copy by one
    thread, so small copies on the host bypass torch.
    """
    on_host = tensor.device.type == there.device.type == "cpu"
    if on_host and tensor.is_contiguous() and tensor.nbytes <= _COPIED_ALONE:
        host_bytes(there)[...] = host_bytes(tensor)
    else:
        there.copy_(tensor)


def to_wire(tensor: Tensor) -> pb.Tensor:
    """Encode a float32, bfloat16 or int32 tensor as a message."""
    message = pb.Tensor()
    put(message, tensor)
    return message


def put(message: pb.Tensor, tensor: Tensor) -> None:
    """Encode `tensor` into the empty `message` in place: assigning a complete message would copy the bytes again."""
    put_shape(message, tensor.dtype, tensor.shape)
    message.data = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def without_data(tensor: Tensor) -> pb.Tensor:
    """Encode only the dtype and shape of a tensor, whose bytes travel through shared memory."""
    message = pb.Tensor()
    put_shape(message, tensor.dtype, tensor.shape)
    return message


def put_shape(message: pb.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    message.dtype = _TO_WIRE[dtype]
    message.shape.extend(shape)


def from_wire(message: pb.Tensor, dtype: torch.dtype | None = None, data: memoryview | Tensor | None = None) -> Tensor:
    """Decode a tensor: a copy of the message's bytes or, if given, a view of `data`, writable bytes on any device.

    Raises InvalidRequest if bytes, shape and dtype disagree, or if the tensor is not of type `dtype`.
    """
    found = _FROM_WIRE.get(message.dtype)
    if found is None or (dtype is not None and found != dtype):
        expected = dtype or "float32, bfloat16 or int32"
        raise InvalidRequest(f"tensor has dtype {found or message.dtype}, expected {expected}")
    raw = bytearray(message.data) if data is None else data
    size, came = math.prod(message.shape) * found.itemsize, len(raw)
    if came != size:
        raise InvalidRequest(f"tensor of shape {list(message.shape)} and {found} needs {size} bytes, {came} came")
    try:
        if isinstance(raw, Tensor):
            flat = raw.view(found)  # fails at an address that is no multiple of the item's size
        else:
            flat = torch.frombuffer(raw, dtype=found) if size else torch.empty(0, dtype=found)
        return flat.view(tuple(message.shape))
    except RuntimeError as error:  # with a 0 among the sizes, the others may overflow
        raise InvalidRequest(f"no tensor of {found} has the shape {list(message.shape)} there: {error}") from error
