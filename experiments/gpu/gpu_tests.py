"""Part 9: `pytest -m gpu`, what only a GPU can show: kernels and graphs in its numbers, memory that two processes map,
and a process that has lost it."""

from __future__ import annotations

import re
import subprocess
import sys

from experiments.gpu.findings import Finding, Findings
from experiments.gpu.packages import ROOT
from experiments.gpu.part import Setting

# By name: what others import is not on such a machine.
_FILES = (
    "tests/spire/model/test_on_gpu.py",
    "tests/draft_service/test_cuda_ipc.py",
    "tests/faults/test_services_lost.py",
)
_OUTCOMES = re.compile(r"(\d+) (passed|failed|error|skipped)")
_LAST = 4000


def measure(setting: Setting, findings: Findings) -> None:
    """Without a GPU they are only collected."""
    command = [sys.executable, "-m", "pytest", *_FILES, "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["--collect-only"] if setting.tiny else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counts = {outcome: int(count) for count, outcome in _OUTCOMES.findall(done.stdout)}
    failed = done.returncode if setting.tiny else counts.get("failed", 0) + counts.get("error", 0)
    findings.failed = bool(failed or done.returncode)
    more = {"counts": counts, "output": (done.stdout + done.stderr)[-_LAST:]}
    note = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    findings.add(Finding("tests that need a GPU, failed", failed, "tests", 0, note, more))
