"""The backend for a device, and what it computes with."""

from __future__ import annotations

import torch

from spire.model.backends.cpu import fused_layer
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.gpu import kernels
from spire.model.backends.gpu.backend import GpuBackend
from spire.model.backends.gpu.fp8 import check_fp8
from spire.model.backends.reference import Reference
from spire.model.config import ModelConfig


def backend_for(device: torch.device) -> Reference:
    """Return a new backend (`Reference`) for one model on this device."""
    return {"cpu": CpuBackend, "cuda": GpuBackend}.get(device.type, Reference)()


def fp8_backend_for(device: torch.device, dtype: torch.dtype) -> Reference:
    """Return a new backend for a draft whose weights are to be in fp8. Raises CheckpointError if that is impossible."""
    check_fp8(device, dtype)
    return GpuBackend(fp8=True)


def computed_by(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Name, for people, the kernels that compute a model with this config on this device, and what they leave to torch.

    On a GPU, supposes that Triton compiles kernels for it.
    """
    if device.type == "cpu":
        return fused_layer.computed_by(config, torch.empty(0, dtype=dtype))
    return kernels.computed_by(config) if device.type == "cuda" else Reference.kernels
