"""Kernels of ours for a GPU, where they can be had: Triton compiles them when they are tried, with a C compiler."""

from __future__ import annotations

import importlib
from types import ModuleType

import structlog
from torch import Tensor

from spire.model.lost_device import device_lost

log = structlog.get_logger()


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def gpu_kernels(pool_XGLK: Tensor, queries_per_key: int) -> ModuleType | None:
    """`paged_attention`, tried on such a pool of keys; None, and a line in the log, where torch must serve.

    Raises what has cost this process its GPU.
    """
    if not on_gpu(pool_XGLK):
        return None
    try:
        kernels = importlib.import_module("spire.model.paged_attention")
        kernels.try_out(pool_XGLK, queries_per_key)
    except Exception as error:  # whatever a compiler may raise: torch serves all the same
        if device_lost(error):
            raise
        log.warning("no kernels of ours for this GPU: torch's operations serve", reason=repr(error)[:200])
        return None
    return kernels
