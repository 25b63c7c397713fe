"""The directory of a model that a user names: a directory, a GGUF file, or a repository of the Hugging Face hub.

A GGUF file is converted once, into the user's cache. Of a repository, the copy in the hub's cache is taken, or it is
downloaded; which cache, endpoint and token count is the hub library's matter (HF_HOME, HF_ENDPOINT, HF_TOKEN).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
from rich.console import Console

from spire.errors import CheckpointError
from spire.files import made_once, user_cache

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
# No pickles, and no weights in other formats.
_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]


def model_directory(named: Path) -> Path:
    """Return the directory of a model, converting or downloading it first if necessary. Raises CheckpointError."""
    if named.suffix.lower() == ".gguf" and named.is_file():
        return _converted(named)
    # What looks like a repository, but whose first part is a directory here, is a wrong path.
    if named.exists() or not _REPOSITORY.fullmatch(str(named)) or named.parent.exists():
        return named
    return _of_hub(str(named))


def _converted(file: Path) -> Path:
    """Return the directory that a GGUF file was converted to, now or earlier."""
    from spire.checkpoints.gguf.convert import convert_gguf

    state = file.resolve().stat()
    key = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    directory = user_cache() / "converted" / f"{file.stem}-{key}"

    def convert(unfinished: Path) -> None:
        console = Console(stderr=True, highlight=False)
        console.print(f"converting {file.name}, once: the result is kept in {directory}", soft_wrap=True)
        convert_gguf(file, unfinished)

    return made_once(directory, convert)


def _of_hub(repository: str) -> Path:
    """Return the directory of a repository in the hub's cache, after downloading what is not there yet."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{repository} is no directory here, and models of the hub need: pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(repository, local_files_only=True, allow_patterns=_FILES))
    except (OSError, ValueError):
        pass  # not in the cache, or not whole
    try:
        return Path(snapshot_download(repository, allow_patterns=_FILES))
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repository} is neither a directory here nor in the local cache of the Hugging Face hub, and downloading "
            f"it failed: {reason}"
        ) from error
