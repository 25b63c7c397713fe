"""Atomic writes of files and directories, and the directory of the user's cache."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spire.errors import DataError


def user_cache() -> Path:
    """Return the directory of calibrations and tokenized corpora: `$XDG_CACHE_HOME/spire`, or `~/.cache/spire`.

    Deleting the directory costs only time.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spire"


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write `file` atomically: call `write` with a temporary path beside `file`, then rename.

    Raises DataError, naming the file, if writing fails.
    """
    unfinished = file.with_name(f"{file.stem}.{os.getpid()}.part{file.suffix}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        os.replace(unfinished, file)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if not isinstance(error, Exception):
            raise
        raise DataError(f"{file} cannot be written ({error}): is the disk full?") from error


def made_once(directory: Path, make: Callable[[Path], object]) -> Path:
    """Return `directory`; if it does not exist, call `make` with a temporary path beside it, then rename.

    If another process makes the same directory meanwhile, the first one that is complete stays. Raises DataError,
    naming the directory, if it cannot be written.
    """
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".part", f"{directory.name}.", directory.parent) as passing:
            unfinished = Path(passing) / directory.name
            make(unfinished)
            try:
                unfinished.rename(directory)
            except OSError:
                if not directory.is_dir():
                    raise
    except OSError as error:
        advice = "free some space, or point XDG_CACHE_HOME to another directory"
        raise DataError(f"{directory} cannot be written ({error.strerror or error}): {advice}") from error
    return directory


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object to `file` atomically. Raises DataError, naming the file, if writing fails."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_whole(file, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))
