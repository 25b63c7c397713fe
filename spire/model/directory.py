"""Read the files of a checkpoint directory as text or JSON objects, and refuse Git LFS pointers and error pages.

A clone without Git LFS has pointers instead of weights and tokenizers; a failed download leaves an error page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spire.errors import CheckpointError

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")


def refuse_stand_in(file: Path) -> None:
    """Raise CheckpointError if `file` is unreadable, empty, a Git LFS pointer or a web page."""
    try:
        with file.open("rb") as opened:
            head = opened.read(256)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    if not head:
        raise CheckpointError(f"{file} cannot be read: it is empty")
    if is_pointer(head):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its directory")
    if head.lstrip().lower().startswith(_PAGES):
        raise CheckpointError(f"{file} is a web page, not the file itself: download it again")


def is_pointer(head: bytes) -> bool:
    """True if `head`, the first bytes of a file, shows that the file is a Git LFS pointer."""
    return head.startswith(_POINTER)


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file. Raises CheckpointError naming a file that cannot be read."""
    refuse_stand_in(file)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError naming a file that contains none."""
    text = read_text(file)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return raw


def read_object_if_any(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file does not exist. Raises the errors of `read_object`."""
    return read_object(file) if file.is_file() else {}
