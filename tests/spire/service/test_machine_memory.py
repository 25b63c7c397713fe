"""What memory is free: of a container what its limit leaves, whatever its host has."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from spire.perf import room
from spire.service import machine_memory
from spire.service.machine_memory import free_memory, memory_limit

MB, GB = 10**6, 10**9


def container(directory: Path, version: int, limit: object, used: int, reclaimable: int = 0) -> Path:
    """Files of a cgroup under `directory`, in the first or the second hierarchy."""
    files, name = (("memory.max", "memory.current"), "inactive_file")
    if version == 1:
        directory, name = directory / "memory", "total_inactive_file"
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / files[0]).write_text(f"{limit}\n")
    (directory / files[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon {used - reclaimable}\n{name} {reclaimable}\nslab 5\n")
    return directory.parent if version == 1 else directory


def host(directory: Path, available: int) -> Path:
    (directory / "meminfo").write_text(
        f"MemTotal: 999999999 kB\nMemAvailable:   {available // 1000} kB\nHugePages_Total:       0\n"
    )
    return directory / "meminfo"


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_limit_leaves(version: int, tmp_path: Path) -> None:
    limited = container(tmp_path, version, 200 * MB, used=150 * MB, reclaimable=30 * MB)
    assert memory_limit(limited) == 200 * MB
    assert free_memory(limited, host(tmp_path, 256 * GB)) == 80 * MB
    assert free_memory(limited, host(tmp_path, 10 * MB)) == 10 * MB // 1000 * 1024


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, 9223372036854771712)])
def test_without_a_limit_the_machine_s_memory_counts(version: int, limit: object, tmp_path: Path) -> None:
    unlimited = container(tmp_path, version, limit, used=150 * MB)
    assert memory_limit(unlimited) == memory_limit(tmp_path / "no cgroups")
    assert free_memory(unlimited, host(tmp_path, 10 * MB)) == 10 * MB // 1000 * 1024


def test_a_container_that_is_full_has_none(tmp_path: Path) -> None:
    assert free_memory(container(tmp_path, 2, 100 * MB, used=101 * MB), tmp_path / "no meminfo") == 0


def test_where_the_kernel_says_nothing_the_machine_s_memory_counts(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path / "no meminfo") == memory_limit(tmp_path)


def test_a_model_on_a_cpu_gets_a_room_within_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given 80 % of what its host had, and killed when it wrote that."""
    limited = container(tmp_path, 2, GB, used=0)
    monkeypatch.setattr(machine_memory, "free_memory", partial(free_memory, limited, host(tmp_path, 256 * GB)))
    found = room.room_for(room.Wishes(64), 131_072, 131_072, room.free_memory(torch.device("cpu")), at_once=False)
    assert found.budget is not None
    assert 0 < found.budget <= 0.8 * GB
