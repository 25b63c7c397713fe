"""Threads that compute together do not take turns at one processor while another is idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from spire.kernels import every_kernels

pytestmark = pytest.mark.skipif(not every_kernels(), reason="no compiler at installation, or none for this processor")

# Says of each thread, the one that calls first, where it may run once kernels have run on several threads.
_PROGRAM = """
import json, os, sys, threading
processors, threads = json.loads(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, processors)
import torch
from spire.kernels import every_kernels
torch.set_num_threads(threads)
x, weight, out = torch.ones(4, 64), torch.ones(64, 64), torch.empty(4, 64)
kernels = every_kernels()[-1]
def compute():
    for _ in range(200):
        kernels.project(x, weight, None, 0, out, 4, 64, 64, threads)
    ids = [threading.get_native_id()] + [int(name) for name in os.listdir("/proc/self/task")]
    print(json.dumps([sorted(os.sched_getaffinity(thread)) for thread in dict.fromkeys(ids)]))
model = threading.Thread(target=compute)
model.start()
model.join()
"""


def where_threads_may_run(processors: list[int], threads: int) -> list[list[int]]:
    command = [sys.executable, "-c", _PROGRAM, json.dumps(processors), str(threads)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[list[int]] = json.loads(answer.stdout)
    return found


@pytest.fixture(scope="module")
def processors() -> list[int]:
    found = sorted(os.sched_getaffinity(0))[:2]
    if len(found) < 2:
        pytest.skip("one processor")
    return found


def test_the_helper_of_a_thread_runs_where_the_thread_does_not(processors: list[int]) -> None:
    caller, *others = where_threads_may_run(processors, threads=2)
    assert caller == processors  # it goes where there is room, and its helper makes way
    assert [len(one) for one in others if one != processors] == [1]


@pytest.mark.thorough
def test_with_more_or_fewer_processors_than_threads_the_system_chooses(processors: list[int]) -> None:
    assert all(one == processors for one in where_threads_may_run(processors, threads=1))
    assert all(one == processors for one in where_threads_may_run(processors, threads=3))
    assert all(one == processors[:1] for one in where_threads_may_run(processors[:1], threads=2))
