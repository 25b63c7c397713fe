"""Main memory of this machine or of this process's container, whichever is less."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# Files below `_CGROUPS` of limit, usage and statistics, and the statistic of reclaimable memory, for cgroup v2 and v1.
_HIERARCHIES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def memory_limit(cgroups: Path = _CGROUPS) -> int:
    """Return the memory limit of this process in bytes: that of its container or, if less, the machine's memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, *_ in _HIERARCHIES:
        with suppress(OSError, ValueError):  # "max" is no number
            limits.append(int((cgroups / limit).read_text()))
    return min(limits)


def free_memory(cgroups: Path = _CGROUPS, meminfo: Path = _MEMINFO) -> int:
    """Return the bytes that can be allocated now without the machine swapping or the container being killed."""
    free = [memory_limit(cgroups)]
    with suppress(OSError, KeyError):
        free.append(_numbers(meminfo)["MemAvailable:"] * 1024)
    for limit, used, statistics, reclaimable in _HIERARCHIES:
        with suppress(OSError, ValueError, KeyError):
            taken = int((cgroups / used).read_text()) - _numbers(cgroups / statistics)[reclaimable]
            free.append(max(0, int((cgroups / limit).read_text()) - taken))
    return min(free)


def _numbers(file: Path) -> dict[str, int]:
    """Parse the lines `name number …` of a kernel file."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
