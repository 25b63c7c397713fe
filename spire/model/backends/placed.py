"""The backend for a device."""

from __future__ import annotations

import torch

from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.gpu.backend import GpuBackend
from spire.model.backends.reference import Reference


def backend_for(device: torch.device) -> Reference:
    """Return a new backend (`Reference`) for one model on this device."""
    return {"cpu": CpuBackend, "cuda": GpuBackend}.get(device.type, Reference)()
