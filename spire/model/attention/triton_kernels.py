"""Load Triton kernels, if available. Triton compiles them on first use, which needs a C compiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import structlog
from torch import Tensor

from spire.lost_device import device_lost

log = structlog.get_logger()


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def load_kernels(module: str, on: Tensor, try_out: Callable[[ModuleType], None]) -> ModuleType | None:
    """Return a module of kernels for the GPU of `on`, or None if torch has to compute.

    The kernels are tried by `try_out`, and a failure is logged. Raises errors after which this process can no longer
    use its GPU.
    """
    if not on_gpu(on):
        return None
    try:
        kernels = importlib.import_module(module)
        try_out(kernels)
    except Exception as error:  # a compiler may raise anything, and torch can serve instead
        if device_lost(error):
            raise
        log.warning("no kernels of ours for this GPU: torch's operations serve", reason=repr(error)[:200])
        return None
    return kernels


def attention_kernels(pages_XGLK: Tensor, queries_per_key: int) -> ModuleType | None:
    """Return the module `paged_attention` if its kernels can serve these pages, or None. Raises as `load_kernels`."""
    module = "spire.model.attention.paged_attention"
    return load_kernels(module, pages_XGLK, lambda kernels: kernels.try_out(pages_XGLK, queries_per_key))
