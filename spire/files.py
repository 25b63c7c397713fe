"""Files that commands leave: each appears whole or not at all. And where they keep what only saves time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from spire.errors import DataError


def user_cache() -> Path:
    """Calibrations, tokenized corpora: `$XDG_CACHE_HOME/spire`, under `~/.cache` where that is not set.

    Deleting it costs only time.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spire"


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `file`, then put it in place: it appears whole or not at all.

    Raises DataError, naming the file, when it cannot be written.
    """
    unfinished = file.with_name(f"{file.stem}.{os.getpid()}.part{file.suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        os.replace(unfinished, file)
    except Exception as error:
        unfinished.unlink(missing_ok=True)
        raise DataError(f"{file} cannot be written ({error}): is the disk full?") from error
