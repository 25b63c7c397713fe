"""Tune how glibc treats freed memory. Without glibc these functions have no effect."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8
_MIB = 1024 * 1024


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for new tensors. Call before any thread begins to compute.

    By default glibc returns freed tensors above some 100 KB to the kernel, and new ones are faulted in page by page.
    """
    # Allocations up to 32 MiB come from the heap, which shrinks by 1 GiB or more only.
    _set({_ARENAS: 1, _MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 1024 * _MIB})


def return_freed_memory() -> None:
    """Make glibc return the freed memory of large requests to the kernel. Call before other threads begin.

    By default glibc has up to eight heaps per core, and keeps more memory the larger the blocks that were freed.
    """
    _set({_ARENAS: 1, _MMAP_THRESHOLD: _MIB // 4, _TRIM_THRESHOLD: _MIB})


def _set(options: dict[int, int]) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in options.items():
            libc.mallopt(option, value)
