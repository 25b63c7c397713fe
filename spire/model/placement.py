"""Where a model runs and in which type: what `--device`, `--dtype` and `--threads` mean."""

from __future__ import annotations

import ctypes
import os

import torch

from spire.errors import CheckpointError

# Parameters below which one thread is faster.
_SMALL_DRAFT = 32_000_000

# M_ARENA_MAX: one heap for all threads. M_MMAP_THRESHOLD: tensors come from it up to the largest size it takes.
# M_TRIM_THRESHOLD: it does not shrink by less than a gigabyte.
_GLIBC_OPTIONS = {-8: 1, -3: 32 * 1024 * 1024, -1: 1024 * 1024 * 1024}


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one. Raises CheckpointError when a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def set_threads(threads: int) -> None:
    """Compute threads of this process; 0 leaves torch's choice.

    So does saying what torch has chosen: being told makes MKL start threads inside the flash kernel's, and decoding
    half as fast.
    """
    if threads and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def loads_kernels_late(device: torch.device) -> bool:
    """Whether each kernel is loaded when it is first launched, as a GPU's are: its first step takes a second."""
    return device.type == "cuda"


def leaves_cores(device: torch.device) -> bool:
    """Whether a model that computes there leaves a core of this host to other processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return device.type != "cpu" or torch.get_num_threads() < cores


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free, for the next ones; call it before any thread begins to compute.

    Left to itself it returns every tensor of more than some 100 KB to the kernel, and each new one is faulted in again,
    page by page: 16 prompts of 1,900 tokens and 128 generated ones went from 220 to 300 tokens a second. Without glibc
    nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in _GLIBC_OPTIONS.items():
            libc.mallopt(option, value)


def draft_threads(draft: torch.nn.Module) -> int:
    """One thread for a small draft, torch's choice (0) for others.

    k passes of a few rows are hundreds of operations too small to share: beside a verifier, 16 sequences took 20 ms on
    two threads and 8 ms on one.
    """
    return 1 if sum(parameter.numel() for parameter in draft.parameters()) < _SMALL_DRAFT else 0
