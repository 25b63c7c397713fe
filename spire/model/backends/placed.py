"""The backend for a device, and what it computes with."""

from __future__ import annotations

import torch

from spire.kernels import kernels_for
from spire.model.backends.cpu import fused_layer
from spire.model.backends.cpu.backend import CpuBackend, Fp8
from spire.model.backends.gpu import kernels
from spire.model.backends.gpu.backend import GpuBackend
from spire.model.backends.gpu.fp8 import check_fp8
from spire.model.backends.reference import Reference
from spire.model.config import ModelConfig


def backend_for(device: torch.device) -> Reference:
    """Return a new backend (`Reference`) for one model on this device."""
    return {"cpu": CpuBackend, "cuda": GpuBackend}.get(device.type, Reference)()


def draft_backend_for(device: torch.device, dtype: torch.dtype, quantization: str = "auto") -> Reference:
    """Return a new backend for one draft. `quantization` of its weights: none, fp8, or auto for `draft_in_fp8`.

    Raises CheckpointError if this device has no fp8; on a CPU, packing a draft does.
    """
    auto = quantization == "auto"
    if quantization == "none" or (auto and not draft_in_fp8(device, dtype)):
        return backend_for(device)
    if device.type == "cpu":
        return CpuBackend(Fp8.IF_FITTING if auto else Fp8.ALWAYS)
    check_fp8(device, dtype)
    return GpuBackend(fp8=True)


def draft_in_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a draft's weights are in fp8 unless told otherwise: on a CPU with kernels."""
    return device.type == "cpu" and kernels_for(dtype) is not None


def computed_by(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Name, for people, the kernels that compute a model with this config on this device, and what they leave to torch.

    On a GPU, supposes that Triton compiles kernels for it.
    """
    if device.type == "cpu":
        return fused_layer.computed_by(config, torch.empty(0, dtype=dtype))
    return kernels.computed_by(config) if device.type == "cuda" else Reference.kernels
