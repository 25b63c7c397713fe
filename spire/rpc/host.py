"""Identify this host, whose processes can share memory. Imports no torch, so that the gateway may import it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return the kernel's boot id, the same for all processes of this host, also in containers; empty if unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def own_directory(shared: Path) -> Path:
    """Return a directory that no other user may enter: `shared` itself or, if others may enter, a subdirectory.

    Raises OSError if the directory cannot be created, or another user could enter it.
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
