"""The device, dtype and threads of a model: the meaning of `--device`, `--dtype` and `--threads`."""

from __future__ import annotations

import os

import torch

from spire.errors import CheckpointError

# Drafts with fewer parameters are faster on one thread.
_SMALL_DRAFT = 32_000_000


def choose_device(name: str) -> torch.device:
    """Return the device; `auto` prefers a GPU. Raises CheckpointError if `cuda` is asked for and there is no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto` is bfloat16 if the hardware multiplies it, otherwise float32."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def set_threads(threads: int) -> None:
    """Set the compute threads of this process; 0 leaves torch's choice.

    A number that torch already uses is not set again: setting any number makes MKL start threads inside those of the
    flash kernel, which slows decoding down.
    """
    if threads and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def loads_kernels_late(device: torch.device) -> bool:
    """True if a kernel is loaded at its first launch, as on a GPU, which slows the first step down."""
    return device.type == "cuda"


def leaves_cores(device: torch.device) -> bool:
    """True if a model on this device leaves a core of this host to other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return device.type != "cpu" or torch.get_num_threads() < cores


def draft_threads(draft: torch.nn.Module) -> int:
    """Return 1 for a small draft, 0 (torch's choice) for others.

    The k passes of a small draft over a few rows are many operations too small to share among threads.
    """
    return 1 if sum(parameter.numel() for parameter in draft.parameters()) < _SMALL_DRAFT else 0
