"""The GPUs of this machine, as `nvidia-smi` of the driver lists them."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"
_FIELDS = "uuid,name,memory.free,memory.total,driver_version,mig.mode.current"
_SECONDS = 10.0


class Gpu(NamedTuple):
    """A GPU with the memory (MiB) that is free and that it has, its driver, and True if it is divided by MIG."""

    uuid: str
    name: str
    free: int
    total: int
    driver: str
    divided: bool


def gpus() -> list[Gpu]:
    """Return all GPUs; an empty list without a driver."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        return [_gpu(row) for row in csv.reader(told.splitlines(), skipinitialspace=True) if row]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _gpu(row: list[str]) -> Gpu:
    uuid, name, free, total, driver, mig = row
    return Gpu(uuid, name, int(free), int(total), driver, mig == "Enabled")


def chosen(environment: Mapping[str, str] = os.environ) -> Gpu | None:
    """Return the GPU with the most free memory. None if there is no choice: fewer than two, MIG, or already chosen."""
    found = [] if VISIBLE in environment else gpus()
    if len(found) < 2 or any(gpu.divided for gpu in found):
        return None
    return max(found, key=lambda gpu: gpu.free)
