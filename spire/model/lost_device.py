"""A GPU that a process has lost. After almost every CUDA error each further call fails until the process has ended.

So whoever takes up an exception to go on asks here first. Out of memory is not among them: what was asked for can be
refused, and the next may fit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import structlog
import torch

# The exit code of a service, which its supervisor then starts again.
LOST_DEVICE = 4

_CUDA_ERROR = re.compile(r"CUDA (driver )?error: |Triton Error \[CUDA\]: ")
_OUT_OF_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED")

log = structlog.get_logger()


def end_if_device_lost(error: BaseException) -> None:
    """End this process, with one line in its log, where the error says that its GPU can be used no more."""
    if device_lost(error):
        log.critical("the GPU is lost, and with it this process", error=str(error).partition("\n")[0])
        os._exit(LOST_DEVICE)


def device_lost(error: BaseException) -> bool:
    """True where this error, or one that it came from, is a CUDA error other than out of memory."""
    return any(map(_is_fatal, _with_causes(error)))


def _is_fatal(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    of_cuda = isinstance(error, torch.AcceleratorError) or _CUDA_ERROR.search(text)
    return bool(of_cuda) and not _OUT_OF_MEMORY.search(text)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
