"""Which host this is: processes of one can share memory and sockets. Imports no torch, for the gateway."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """What all processes of a running kernel have in common, in containers too. Empty where it cannot be told."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
