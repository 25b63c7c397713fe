"""What tests of the deployment share: where it lies, and tools that a machine may lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.compose import DEPLOY
from tests.services import Services, running


@pytest.fixture(scope="session")
def promtool() -> str:
    """Its path. Debian's package `prometheus` brings it."""
    if (found := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return found


def make_secrets(directory: Path) -> None:
    """Run it as `make compose-up` does, with the `spire` of this Python."""
    commands = directory.with_name(f"{directory.name}-commands")
    commands.mkdir(exist_ok=True)
    (commands / "spire").write_text(f'#!/bin/sh\nexec {sys.executable} -m spire.cli "$@"\n')
    (commands / "spire").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(DEPLOY.parent),
    }
    subprocess.run(["sh", DEPLOY / "make-secrets", directory], env=environment, check=True, timeout=60)


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deployed") / "secrets"
    make_secrets(directory)
    return directory


@pytest.fixture(scope="session")
def system(stories_dir: Path, stories_draft_dir: Path, secrets: Path) -> Iterator[Services]:
    """The three services, each with its own secrets."""
    own = {name: ["--tls", str(secrets / "tls" / name)] for name in ("gateway", "verifier", "draft")}
    keys = ["--keys", str(secrets / "keys" / "api_keys")]
    with running(
        stories_dir,
        stories_draft_dir,
        verifier_options=own["verifier"],
        draft_options=own["draft"],
        gateway_options=[*own["gateway"], *keys],
    ) as services:
        yield services


@pytest.fixture(scope="session")
def your_key(secrets: Path) -> dict[str, str]:
    """The header that lets you in."""
    return {"Authorization": f"Bearer {(secrets / 'you' / 'api_key').read_text().strip()}"}
