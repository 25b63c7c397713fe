"""Which host this is: processes of one can share memory and sockets. Imports no torch, for the gateway."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """What all processes of a running kernel have in common, in containers too. Empty where it cannot be told."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def own_directory(shared: Path) -> Path:
    """Where processes of one user meet: this directory where nobody else may enter it, else one of their own inside.

    Raises OSError where there is none and none can be made, and where another user could enter it.
    """
    if _is_own(shared):
        return shared
    own = shared / f"spire-{os.geteuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(own):
        raise PermissionError(
            f"{own} is another user's, or open to others: remove it, or choose another --shared-memory"
        )
    return own


def _is_own(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
