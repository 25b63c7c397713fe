"""The name a model is known by, from where it lies."""

from __future__ import annotations

from pathlib import Path

_HUB_PREFIX = "models--"


def model_name(directory: Path) -> str:
    """The directory's own name; ORGANISATION/NAME for a snapshot in a Hugging Face cache, whose own name is a hash.

    That cache keeps models as `models--ORGANISATION--NAME/snapshots/HASH`.
    """
    path = directory.resolve()
    holder = path.parent.parent.name
    if path.parent.name == "snapshots" and holder.startswith(_HUB_PREFIX):
        return holder.removeprefix(_HUB_PREFIX).replace("--", "/")
    return path.name
