"""Detection of a lost GPU. After almost every CUDA error all further CUDA calls of the process fail.

Code that catches an exception and continues must therefore check for a lost GPU first. Out of memory loses no GPU:
the request can be refused, and the next one may fit.
"""

from __future__ import annotations

import os
import re

import structlog
import torch

# Exit code of a service that has lost its GPU; the supervisor then restarts the service.
LOST_DEVICE = 4

_CUDA_ERROR = re.compile(r"CUDA (driver )?error: |Triton Error \[CUDA\]: ")
_OUT_OF_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED")

log = structlog.get_logger()


def end_if_device_lost(error: BaseException) -> None:
    """Log one line and exit this process if `error` means that the process has lost its GPU."""
    if device_lost(error):
        log.critical("the GPU is lost, and with it this process", error=str(error).partition("\n")[0])
        os._exit(LOST_DEVICE)


def device_lost(error: BaseException | None) -> bool:
    """True if `error` or one of its causes means a lost GPU: any CUDA error other than out of memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text, of_memory = str(error), isinstance(error, torch.OutOfMemoryError)
        of_cuda = isinstance(error, torch.AcceleratorError) or _CUDA_ERROR.search(text)
        if isinstance(error, RuntimeError) and of_cuda and not of_memory and not _OUT_OF_MEMORY.search(text):
            return True
        error = error.__cause__ or error.__context__
    return False
