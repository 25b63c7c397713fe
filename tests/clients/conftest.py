"""A live system for clients that others wrote: stories260K with a chat template, drafted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import eventually
from tests.services import Services, running


@pytest.fixture(scope="session")
def services(stories_chat_dir: Path, stories_draft_dir: Path) -> Iterator[Services]:
    with running(stories_chat_dir, stories_draft_dir) as system:
        eventually(lambda: httpx.get(f"{system.url}/ready").json().get("draft") == "connected")
        yield system


@pytest.fixture(scope="session")
def url(services: Services) -> str:
    return services.url


def run_tool(command: list[str], directory: Path) -> str:
    """What an installed tool prints; the test is skipped where it is not installed. No tool reaches for the network."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: pip install -e '.[clients]' -c constraints.txt")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
