"""The host's launches, copies and waits during a piece of work on a GPU, and the kernels that take its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# By the beginning of what CUDA calls it.
_CALLS = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel"),
    "graphs": ("cudaGraphLaunch", "cuGraphLaunch"),
    "copies": ("cudaMemcpy", "cudaMemset"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
_KERNELS = 8
_NAME = 60


def launches(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Count the launches of one call of `work`; return nothing where there is no GPU.

    `launches`, `graphs`, `copies`, `waits`: calls of the host. `gpu_ms`: the time in which kernels ran, by themselves.
    `kernels`: those that took most of it, with their milliseconds.
    """
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize(device)
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in recorded.events() or []:
        calls.update(what for what, names in _CALLS.items() if event.name.startswith(names))
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name[:_NAME]] += event.device_time_total / 1000
    calls["waits"] -= 1  # the one above
    most = {name: round(milliseconds, 3) for name, milliseconds in kernels.most_common(_KERNELS)}
    return {**calls, "gpu_ms": round(sum(kernels.values()), 3), "kernels": most}


def in_words(counted: dict[str, Any]) -> str:
    """For a note in the table; empty where there is nothing."""
    if not counted:
        return ""
    calls = ", ".join(f"{counted.get(what, 0)} {what}" for what in _CALLS)
    return f"; {calls}, {counted['gpu_ms']:.3g} ms of kernels"
