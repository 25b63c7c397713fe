"""Derive a model's name from its directory."""

from __future__ import annotations

from pathlib import Path


def model_name(directory: Path) -> str:
    """Return the directory's name, or ORGANISATION/NAME for a snapshot in a Hugging Face cache.

    The cache keeps a snapshot in `models--ORGANISATION--NAME/snapshots/HASH`.
    """
    path = directory.resolve()
    holder = path.parent.parent.name
    if path.parent.name == "snapshots" and holder.startswith("models--"):
        return holder.removeprefix("models--").replace("--", "/")
    return path.name
