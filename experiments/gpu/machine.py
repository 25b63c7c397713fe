"""The machine that figures belong to: card, driver, versions, as one line of JSON.

python -m experiments.gpu.machine
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch


def describe() -> dict[str, object]:
    found: dict[str, object] = {
        "card": "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "cuda": torch.version.cuda,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"card": properties.name, "card_gb": properties.total_memory / 1e9, "driver": _driver()}
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    return told.stdout.splitlines()[0].strip() if told.returncode == 0 and told.stdout else None


if __name__ == "__main__":
    print(json.dumps(describe()))
