"""Which errors end a process: those of CUDA after which it can compute nothing more."""

from __future__ import annotations

import pytest
import torch

from spire.errors import OutOfCapacity
from spire.lost_device import device_lost


def caused_by(error: Exception) -> OSError:
    try:
        raise OSError("CUDA: what is shared cannot be opened") from error
    except OSError as outer:
        return outer


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("unspecified launch failure"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("CUDA driver error: unknown error"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        caused_by(torch.AcceleratorError("CUDA error: unspecified launch failure")),
    ],
    ids=str,
)
def test_an_error_of_cuda_means_that_the_device_is_lost(error: Exception) -> None:
    assert device_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("shape '[2]' is invalid for input of size 3"),
        OSError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)"),
        OutOfCapacity("no memory for 5 more positions of 2 sequences"),
    ],
    ids=str,
)
def test_out_of_memory_and_what_is_none_of_cudas_is_lived_with(error: Exception) -> None:
    assert not device_lost(error)
