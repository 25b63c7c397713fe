"""What another user of the host gets of a running `spire up`: the health of its services, and nothing else.

Skipped where the tests do not run as root, who alone can become another user; where they do and cannot, it fails.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spire.rpc.carrier import OverwritingRingReader
from spire.rpc.host import own_directory
from tests.security.protocol import METHODS
from tests.system.test_up import Running, up

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

MEMORY = Path("/dev/shm")


@dataclass
class Tried:
    """What there was, and what became of what the stranger tried."""

    services: list[str]
    files: list[Path]
    outcome: dict[str, Any]


@pytest.fixture(scope="module")
def tried(stories_dir: Path, stories_draft_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    """A system that serves, a ring beside it, and a stranger who has been told all their names."""
    log = tmp_path_factory.mktemp("up") / "up.log"
    system = Running(up(stories_dir, stories_draft_dir, "--prompt", ""), log)
    with ExitStack() as stack:
        stack.callback(system.process.wait, 30)
        stack.callback(system.process.terminate)
        found = re.search(r"logs +(\S+)", system.printed)
        assert found, system.printed
        directory = Path(found[1])
        ring = OverwritingRingReader(MEMORY, 4096)
        files = [path for top in (directory, own_directory(MEMORY)) for path in (top, *top.rglob("*"))]
        services = [(directory / f"{name}.ready").read_text() for name in ("verifier", "draft")]
        done = subprocess.run(
            [sys.executable, "-m", "tests.security.stranger"],
            input=json.dumps({"services": services, "files": list(map(str, files))}),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert system.text()
        yield Tried(services, files, json.loads(done.stdout))
        del ring


def test_it_is_another_user_who_reaches_the_services(tried: Tried) -> None:
    assert tried.outcome["uid"] != os.getuid()
    assert tried.outcome["health"] == ["UNAVAILABLE", "SERVING"], "the verifier's socket lies where only its user comes"


@pytest.mark.fault(36)
def test_every_call_of_another_user_is_refused(tried: Tried) -> None:
    assert len(tried.outcome["calls"]) == len(METHODS) * len(tried.services)
    verifier, _ = tried.services
    reached = {call: status for call, status in tried.outcome["calls"].items() if not call.endswith(verifier)}
    assert set(reached.values()) == {"UNAUTHENTICATED"}
    assert {status for call, status in tried.outcome["calls"].items() if call not in reached} == {"UNAVAILABLE"}


@pytest.mark.fault(36)
def test_no_file_or_socket_opens_for_another_user(tried: Tried) -> None:
    suffixes = {path.suffix for path in tried.files}
    assert suffixes >= {".log", ".ready", ".ring", ".sock"}
    assert "secret" in {path.name for path in tried.files}
    assert tried.outcome["opened"] == {str(path): [] for path in tried.files}


def test_what_spire_makes_is_for_its_own_user(tried: Tried) -> None:
    assert {str(path): oct(path.stat().st_mode & 0o077) for path in tried.files if path.exists()} == {
        str(path): "0o0" for path in tried.files if path.exists()
    }
