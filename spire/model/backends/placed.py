"""The backend for a device."""

from __future__ import annotations

import torch

from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.gpu.backend import GpuBackend
from spire.model.backends.gpu.fp8 import check_fp8
from spire.model.backends.reference import Reference


def backend_for(device: torch.device) -> Reference:
    """Return a new backend (`Reference`) for one model on this device."""
    return {"cpu": CpuBackend, "cuda": GpuBackend}.get(device.type, Reference)()


def fp8_backend_for(device: torch.device, dtype: torch.dtype) -> Reference:
    """Return a new backend for a draft whose weights are to be in fp8. Raises CheckpointError if that is impossible."""
    check_fp8(device, dtype)
    return GpuBackend(fp8=True)
