"""The services on the device that is measured. When something fails, their last lines are part of what is raised."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from experiments.gpu.findings import Finding, Findings
from experiments.gpu.part import Setting
from spire.bench.system import System
from spire.cli.paths import Pair
from spire.cli.serving import serving
from spire.cli.up import ModelOptions

# A traceback is one line of JSON.
_LINES, _LONGEST = 12, 3000


class ServicesFailed(Exception):
    """Something failed while services ran. Their lines may tell of a lost GPU: it is theirs, not this process's."""


@contextmanager
def served(
    setting: Setting, findings: Findings, pair: Pair, dtype: str | None = None, acceptance: float | None = None
) -> Iterator[System]:
    """As `spire up` starts them. `acceptance`: how often a draft token stands, whatever the target says.

    What they have taken of the GPU by the end is a finding: torch keeps what it once had.
    """
    setting.forget_peak()
    with tempfile.TemporaryDirectory(prefix="spire-gpu-") as name:
        options = ModelOptions(dtype, setting.device.type, None)
        try:
            with serving(None, pair, options, acceptance, directory=Path(name)) as system:
                yield system
                if findings.failed:
                    findings.add(Finding("what the services said", None, more={"lines": _last_lines(Path(name))}))
                if setting.device.type == "cuda":
                    free, total = torch.cuda.mem_get_info(setting.device)
                    findings.add(Finding("memory of the GPU, all processes", (total - free) / 1e9, "GB"))
        except Exception as error:
            raise ServicesFailed(f"{_last_lines(Path(name))}\n{type(error).__name__}: {error}") from error


def _last_lines(directory: Path) -> str:
    told = {log.stem: log.read_text(errors="replace").splitlines()[-_LINES:] for log in sorted(directory.glob("*.log"))}
    return "\n".join(f"{name}: {line[-_LONGEST:]}" for name, lines in told.items() for line in lines)
