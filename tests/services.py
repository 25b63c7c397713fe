"""The real services as processes on loopback, for tests. Ports are free ones, everything ends with the block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.forks import Fork

_PATIENCE_SECONDS = 240
_WAITS, _IS_WAITED_FOR = ("--wait-ms", "2000"), ("--draft-deadline", "20")


@dataclass
class Service:
    """A running service: its process, where it listens, how it was started."""

    process: Fork
    address: str
    command: list[str]
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)


@dataclass
class Services:
    """What `running` started."""

    url: str
    verifier: Service
    gateway: Service
    draft: Service | None = None
    directory: Path = field(default_factory=Path)

    def restart_draft(self) -> None:
        """A new process on the old port, as a supervisor would."""
        assert self.draft is not None
        port = self.draft.address.rsplit(":", 1)[1]
        command = self.draft.command.copy()
        command[command.index("--port") + 1] = port
        self.draft = start(command, self.directory)


def wait_until_connected(gateway: Service, peers: set[str]) -> None:
    """A gateway listens before it has met the others. Its log tells, also where `/ready` wants a key."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if line[:1] + line[-1:] == "{}"]
        if peers <= {line["peer"] for line in lines if line.get("event") == "connected"}:
            return
        assert time.monotonic() < deadline, f"the gateway has not met both of {peers}: {lines}"
        time.sleep(0.02)


def start(command: Sequence[str], directory: Path) -> Service:
    """Run `python <command>` and wait until it says where it listens. Raises RuntimeError with its log if it dies."""
    assert command[0] == "-m", f"{command[0]} run by its path would find tests/spire in the place of spire"
    ready = Path(tempfile.mktemp(dir=directory, suffix=".ready"))
    log = ready.with_suffix(".log")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPIRE_")}
    process = Fork([*command[1:], "--ready-file", str(ready)], environment, log)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"{' '.join(command)} did not start:\n{log.read_text()}")
        time.sleep(0.02)
    return Service(process, ready.read_text().strip(), list(command), log)


@contextmanager
def running(
    model: Path,
    draft: Path | Literal["magicdec"] | None = None,
    *,
    dtype: str = "float32",
    k: int | None = 4,
    verifier: Sequence[str] = ("-m", "verifier_service"),
    verifier_options: Sequence[str] = (),
    draft_options: Sequence[str] = (),
    gateway: Sequence[str] = ("-m", "gateway"),
    gateway_options: Sequence[str] = (),
    patient: bool = True,
) -> Iterator[Services]:
    """Verifier, draft if one is given, and gateway, ready to answer. With `magicdec` the verifier is the draft.

    Without `k` the gateway chooses it. `patient`: however the machine stutters, the draft waits for its activations and
    the gateway for the draft.
    """
    if patient:
        draft_options, gateway_options = [*_WAITS, *draft_options], [*_IS_WAITED_FOR, *gateway_options]
    services: list[Service] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            common = ["--port", "0", "--dtype", dtype]
            target = start([*verifier, "--model", str(model), *common, *verifier_options], directory)
            services.append(target)
            follower = None
            gateway_command = [*gateway, "--verifier", target.address, "--port", "0"]
            gateway_command += [*([] if k is None else ["--k", str(k)]), *gateway_options]
            gateway_command += ["--draft", "off" if draft is None else "magicdec" if draft == "magicdec" else "auto"]
            if isinstance(draft, Path):
                options = ["--draft", str(draft), "--verifier", target.address, *common, *draft_options]
                follower = start(["-m", "draft_service", *options], directory)
                services.append(follower)
            front = start(gateway_command, directory)
            services.append(front)
            system = Services(f"http://{front.address}", target, front, follower, directory)
            wait_until_connected(front, {"verifier"} if draft is None else {"verifier", "draft"})
            try:
                yield system
            finally:
                services.append(system.draft or front)  # it may be another draft by now
        finally:
            for service in services:
                if service.process.poll() is None:
                    service.process.terminate()
            for service in services:
                try:
                    service.process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    service.kill()
