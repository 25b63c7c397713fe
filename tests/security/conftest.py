"""Gateways that ask for keys, and keys for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from spire.service.keys import create_key
from tests.services import Services, running, start


@dataclass(frozen=True)
class Guarded:
    """A gateway's URL, its file of keys, and the key of alice."""

    url: str
    file: Path
    key: str
    services: Services | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


@contextmanager
def gateway_alone(directory: Path) -> Iterator[Guarded]:
    """A gateway without any peer: whom it lets in does not depend on them."""
    file = directory / "keys"
    key = create_key("alice", file)
    peers = ["--verifier", "127.0.0.1:9", "--startup-patience", "0"]
    gateway = start(["-m", "gateway", *peers, "--port", "0", "--keys", str(file)], directory)
    yield Guarded(f"http://{gateway.address}", file, key)
    gateway.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """For tests that leave its keys alone."""
    with gateway_alone(tmp_path_factory.mktemp("guarded")) as gateway:
        yield gateway


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Guarded]:
    """For tests that change its keys."""
    with gateway_alone(tmp_path) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def serving(stories_dir: Path, stories_draft_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """The three services, behind a key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    key = create_key("alice", file)
    with running(stories_dir, stories_draft_dir, gateway_options=["--keys", str(file)]) as services:
        yield Guarded(services.url, file, key, services)


def refused_start(*command: str) -> str:
    """What a service says on stderr that must not start."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPIRE_")}
    done = subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr
