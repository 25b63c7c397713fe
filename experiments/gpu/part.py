"""One part as a process: `python -m experiments.gpu.part MODULE FILE [--dry-run]`. Its findings go to FILE.

Each module has `measure(setting, findings)`.
"""

from __future__ import annotations

import importlib
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

# Sets how OpenMP waits, as the services do: before torch.
import spire.service.process  # noqa: F401

# isort: split
import torch

from experiments.gpu.findings import Findings


@dataclass(frozen=True)
class Setting:
    """The device of a part. `tiny`: use shapes that take a CPU no time."""

    device: torch.device
    tiny: bool

    @property
    def least_seconds(self) -> float:
        """The shortest time of one measurement."""
        return 0.01 if self.tiny else 0.3

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what other processes need, too
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gb(self) -> float:
        """Most memory since `forget_peak`: what this process's tensors took of the GPU, or else this process at all."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    module, file = sys.argv[1:3]
    tiny = "--dry-run" in sys.argv
    setting = Setting(torch.device("cpu" if tiny else "cuda"), tiny)
    findings = Findings(Path(file))
    importlib.import_module(f"experiments.gpu.{module}").measure(setting, findings)
    sys.exit(findings.failed)


if __name__ == "__main__":
    main()
