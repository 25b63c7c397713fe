"""Choose a model's device, dtype and threads, as `--device`, `--dtype` and `--threads` specify."""

from __future__ import annotations

import os

import torch

from spire.errors import CheckpointError

# Drafts with fewer parameters are faster on one thread.
_SMALL_DRAFT = 32_000_000


def choose_device(name: str) -> torch.device:
    """Return the torch device for `--device`; `auto` prefers a GPU. Raises CheckpointError for `cuda` without a GPU.

    Of several GPUs it is the first in CUDA_VISIBLE_DEVICES.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return the name of a device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for `--dtype`; `auto` is bfloat16 if the hardware multiplies bfloat16, otherwise float32."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def set_threads(threads: int) -> None:
    """Set the number of compute threads of this process; 0 keeps torch's default.

    A number that torch already uses is not set again: setting any number makes MKL start threads within the threads of
    the flash kernel, which slows decoding down.
    """
    if threads and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def loads_kernels_late(device: torch.device) -> bool:
    """True for a GPU, which loads a kernel only at its first launch, so that the first step is slow."""
    return device.type == "cuda"


def leaves_cores(device: torch.device) -> bool:
    """True if a model computing on this device leaves at least one CPU core of this host idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return device.type != "cpu" or torch.get_num_threads() < cores


def draft_threads(draft: torch.nn.Module) -> int:
    """Return the number of compute threads for a draft: 1 if it is small, otherwise 0 (torch's default).

    The k passes of a small draft over a few rows are many operations too small to share among threads.
    """
    return 1 if sum(parameter.numel() for parameter in draft.parameters()) < _SMALL_DRAFT else 0
