"""The matrix tiles of x86 processors (AMX) and what they compute here: `_tiles.c`.

Built at installation where there is a C compiler. Without it, or on another processor, torch's kernels serve.
"""

from __future__ import annotations

from typing import Any

try:
    from spire.model import _tiles

    kernels: Any = _tiles
except ImportError:  # it was installed where there is no compiler
    kernels = None

COMPILED = kernels is not None


def available() -> bool:
    """Whether this process can use them. To ask is what lets it."""
    return COMPILED and bool(kernels.available())
