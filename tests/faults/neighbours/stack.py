"""`spire up` with its default limits and two keys, and what the kernel knows of its processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from spire.service.keys import GATEWAY_KEY, create_key
from tests.verifier_service.harness import free_port

MODULES = ("verifier_service", "draft_service", "gateway")
PATIENCE_SECONDS = 240.0
SETTLED_WITHIN = 30.0
# Of glibc, for threads: not reserved either.
_LARGEST_HEAP = 64 * 1024 * 1024


@dataclass(frozen=True)
class Gateway:
    """Where requests go, and in whose name: all that a client knows."""

    url: str
    key: str
    max_context: int

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@dataclass
class Stack:
    """The supervisor, its services' process ids as they were when all served, and what it printed."""

    supervisor: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    victim_key: str
    attacker_key: str
    said: Path
    max_context: int = 0
    pids: dict[str, int] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def as_seen_by(self, key: str) -> Gateway:
        return Gateway(self.url, key, self.max_context)

    @property
    def victim(self) -> Gateway:
        return self.as_seen_by(self.victim_key)

    @property
    def attacker(self) -> Gateway:
        return self.as_seen_by(self.attacker_key)

    def running(self) -> dict[str, int]:
        """Process ids by service, as they are now."""
        return {module: pid for pid in _children(self.supervisor.pid) if (module := _module(pid))}

    def lost(self) -> list[str]:
        """Services whose process is another than at first, and what the supervisor said of them."""
        now, before = self.running(), self.pids or {}
        gone = [module for module, pid in before.items() if now.get(module) != pid]
        told = [line for line in self.said.read_text(errors="replace").splitlines() if "restarting" in line]
        return [*gone, *told]

    def resident(self) -> dict[str, int]:
        """Bytes by service."""
        return {module: _resident_bytes(pid) for module, pid in self.running().items()}

    def resident_besides_cache(self) -> int:
        """Bytes of all services, but for the pages of the target's cache: these fill up to a bound of their own."""
        cache = sum(map(_cache_bytes, self.running().values()))
        return sum(self.resident().values()) - cache

    def verifier_counters(self) -> dict[str, dict[str, float]]:
        """What the verifier counts, by name and kind; without a kind under an empty one."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30).text
        found: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name][sample.labels.get("kind", "")] = sample.value
        return found

    def settle(self) -> None:
        """Wait until nobody is served any more, or for half a minute."""
        deadline = time.monotonic() + SETTLED_WITHIN
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if not self._sequences():
                    break
            time.sleep(0.5)
        time.sleep(2)

    def _sequences(self) -> float:
        text = httpx.get(f"{self.url}/metrics", headers=self.victim.headers, timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith("spire_sequences_now")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@contextmanager
def stack(options: Sequence[str] = (), descriptors: int | None = None) -> Iterator[Stack]:
    """Started with these options of `spire up`; `descriptors`: as many as each process may have."""
    with tempfile.TemporaryDirectory(prefix="neighbours-") as directory:
        keys, said = Path(directory) / "keys", Path(directory) / "said"
        port, metrics_port = free_port(), free_port()
        victim, attacker = create_key("victim", keys), create_key("attacker", keys)
        command = [sys.executable, "-m", "spire.cli", "up", "--model", "tiny", "--prompt", ""]
        command += ["--port", str(port), "--keys", str(keys)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPIRE_")}
        environment |= {GATEWAY_KEY: victim, "SPIRE_VERIFIER_METRICS_PORT": str(metrics_port)}
        limit = None if descriptors is None else lambda: _limit_descriptors(descriptors)
        with said.open("wb") as log:
            supervisor = subprocess.Popen(
                [*command, *options],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=limit,
            )
        built = Stack(supervisor, port, metrics_port, victim, attacker, said)
        try:
            _wait_until_ready(built)
            yield built
        finally:
            _stop(supervisor)


def _wait_until_ready(built: Stack) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        if built.supervisor.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"spire up did not serve:\n{built.said.read_text(errors='replace')}")
        with suppress(httpx.HTTPError, KeyError):
            answer = httpx.get(f"{built.url}/ready", headers=built.victim.headers, timeout=5)
            if answer.is_success and "Serving" in built.said.read_text(errors="replace"):
                built.max_context, built.pids = answer.json()["max_context"], built.running()
                return
        time.sleep(0.2)


def _stop(supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.send_signal(signal.SIGTERM)
    try:
        supervisor.wait(60)
    except subprocess.TimeoutExpired:
        supervisor.kill()  # the kernel ends its services with it
        supervisor.wait()


def _limit_descriptors(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def _module(pid: int) -> str:
    """The service that a process is; empty if it is none."""
    with suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return next((module for module in MODULES if module in arguments), "")
    return ""


def _cache_bytes(pid: int) -> int:
    """Resident bytes of large anonymous mappings without reservation, which only the cache's pools have."""
    found = size = resident = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, *values = line.split()
            if "-" in name:
                begin, end = (int(address, 16) for address in name.split("-"))
                size = end - begin if len(values) == 4 else 0  # a mapping of a file has a name
            elif name == "Rss:":
                resident = 1024 * int(values[0])
            elif name == "VmFlags:" and "nr" in values and size > _LARGEST_HEAP:
                found += resident
    return found


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0
