"""Verifier, draft and gateway as processes, breakable wires between them, and what of them must return to baseline.

gateway ── to_verifier ──► verifier ◄── activations, orders ── draft
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.history import SILENCE, Body, Load, Record, undisturbed
from tests.faults.proxy import Proxy, proxied
from tests.gateway.conftest import eventually
from tests.services import Service, start
from tests.verifier_service.harness import free_port

SETTLED_WITHIN = 5.0


@dataclass(frozen=True)
class Endured:
    """One fault under load, in seconds from its beginning. Goodput is tokens a second."""

    requests: int
    detection: float
    recovery: float
    goodput_before: float
    goodput_during: float
    goodput_after: float


@dataclass
class System:
    directory: Path
    verifier: Service
    draft: Service
    gateway: Service
    to_verifier: Proxy
    activations: Proxy
    metrics_ports: dict[str, int]
    expected: dict[str, Record] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    # -- what it is like -----------------------------------------------------------------------------------------------

    def ready(self) -> dict[str, str]:
        """`/ready`, as text; of one that is not, `status` is `503`."""
        answer = httpx.get(f"{self.url}/ready", timeout=60)
        return answer.json() if answer.is_success else {"status": str(answer.status_code)}

    def is_whole(self) -> bool:
        return self.ready()["status"] == "ready"

    def metric(self, service: str, name: str, **labels: str) -> float:
        """Sum over the samples; `service` is gateway, verifier or draft."""
        url = self.url if service == "gateway" else f"http://127.0.0.1:{self.metrics_ports[service]}"
        families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text)
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found)  # a counter with labels has no samples before it has counted

    def held(self) -> dict[str, float]:
        """What may leak: sequences (and with them their cache; what is kept for later prompts is bounded by itself),
        tasks, and each process' descriptors and threads."""
        of_processes = {
            f"{name} {what}": float(held_by(service.process.pid))
            for name, service in (("verifier", self.verifier), ("draft", self.draft), ("gateway", self.gateway))
            for what, held_by in (("descriptors", _descriptors), ("threads", _threads))
        }
        return of_processes | {
            "gateway tasks": self.metric("gateway", "spire_tasks_now"),
            "gateway sequences": self.metric("gateway", "spire_sequences_now"),
            "verifier sequences": self.metric("verifier", "spire_verifier_slots_used"),
            "draft sequences": self.metric("draft", "spire_draft_sequences"),
        }

    def leaks(self) -> dict[str, tuple[float, float]]:
        """What is still held 5 s from now beyond what was held at the beginning: (then, now)."""
        deadline = time.monotonic() + SETTLED_WITHIN
        while left := {k: (self.baseline[k], now) for k, now in self.held().items() if now > self.baseline[k]}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)  # what asks holds connections, too
        return left

    # -- what is done to it --------------------------------------------------------------------------------------------

    @contextmanager
    def failpoint(self, name: str) -> Iterator[None]:
        (self.directory / name).touch()
        try:
            yield
        finally:
            (self.directory / name).unlink(missing_ok=True)

    def revive(self, name: str) -> None:
        """A new process in the place of a dead one, as a supervisor would start it."""
        old: Service = getattr(self, name)
        command = old.command.copy()
        command[command.index("--port") + 1] = old.address.rsplit(":", 1)[1]
        setattr(self, name, start(command, self.directory))

    def heal(self) -> None:
        """Undo whatever a failed test left behind."""
        for proxy in (self.to_verifier, self.activations):
            proxy.heal()
        for name in ("verifier", "draft"):
            service: Service = getattr(self, name)
            if service.process.poll() is not None:
                self.revive(name)
            else:
                service.process.send_signal(signal.SIGCONT)
        eventually(self.is_whole, within=60)

    def stop(self) -> None:
        for service in (self.gateway, self.draft, self.verifier):
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)
                service.process.kill()
            service.process.wait(10)

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def prime(self) -> None:
        """Have the first grammar compiled, and the first long body read: what that leaves behind, stays."""
        for body in ({"prompt": "x", "guided_regex": "[a-z]"}, {"prompt": "x " * 5000, "max_tokens": 1}):
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=SILENCE)

    def learn(self, requests: Sequence[Body]) -> None:
        """Ask once while nothing happens: what is then held and answered is what is right."""
        self.prime()
        records = undisturbed(self.url, requests)
        self.expected = {repr(record.body): record for record in records}
        time.sleep(0.5)
        self.baseline = self.held()

    def ask(self) -> list[Record]:
        """The requests whose answers are known, all at once."""
        with Load(self.url, [record.body for record in self.expected.values()]) as load:
            pass
        return load.records

    def wrong(self, records: Sequence[Record]) -> dict[str, list[str]]:
        """By request, what is wrong with its answer."""
        return {repr(record.body): found for record in records if (found := self.problems(record))}

    def problems(self, record: Record) -> list[str]:
        return record.problems(self.expected[repr(record.body)])

    def endure(
        self,
        begin: Callable[[], object],
        seen: Callable[[], bool],
        end: Callable[[], object],
        over: Callable[[], bool] | None = None,
        patience: float = 30.0,
    ) -> Endured:
        """A fault under load: it begins, is seen, ends and is over. Every request is as if it had not been, and
        nothing is left of it."""
        with Load(self.url, [record.body for record in self.expected.values()], repeat=True) as load:
            eventually(lambda: load.flowing, within=60)
            began = time.monotonic()
            begin()
            detection = _until(seen, began, patience)
            end()
            recovery = _until(over or self.is_whole, began, patience)
            time.sleep(0.3)
        ended = max(when for record in load.records for when, _ in record.arrivals)
        first = min(when for record in load.records for when, _ in record.arrivals)
        assert self.wrong(load.records) == {}
        left = self.leaks()
        assert left == {}, f"still held, as (at the beginning, now): {left}"
        return Endured(
            len(load.records),
            detection,
            recovery,
            load.goodput(first, began),
            load.goodput(began, began + recovery),
            load.goodput(began + recovery, ended),
        )


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _threads(pid: int) -> int:
    """The threads of a process without gRPC's own pool: it grows on a busy machine, and shrinks 20 s later."""
    names = [_thread_name(Path(thread.path)) for thread in os.scandir(f"/proc/{pid}/task")]
    return len([name for name in names if name and name != "event_engine"])


def _thread_name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""


def _until(true: Callable[[], bool], began: float, patience: float) -> float:
    """Seconds since the fault began until it was true."""
    while not true():
        assert time.monotonic() - began < patience, f"not within {patience} s"
        time.sleep(0.002)
    return time.monotonic() - began


@contextmanager
def system(
    model: Path,
    draft: Path,
    *,
    gateway_options: Sequence[str] = (),
    verifier_options: Sequence[str] = (),
    draft_options: Sequence[str] = (),
    apart: bool = False,
) -> Iterator[System]:
    """All three, whole and ready. `apart`: the draft is as on another host, and all that it says passes the wires."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        services: list[Service] = []

        def run(*command: str) -> Service:
            services.append(service := start([*command], directory))
            stack.callback(lambda: _kill(service))
            return service

        def wire(service: Service) -> Proxy:
            return stack.enter_context(proxied(service.address))

        ports = {"verifier": free_port(), "draft": free_port()}
        failing = ["-m", "tests.faults.failing", str(directory)]
        common = ["--port", "0", "--dtype", "float32", "--metrics-port"]
        target = ["verifier_service", "--model", str(model), *common, str(ports["verifier"]), *verifier_options]
        verifier = run(*failing, *target)
        to_verifier, activations = wire(verifier), wire(verifier)
        follow = ["--draft", str(draft), "--verifier", activations.address, *common, str(ports["draft"])]
        follow += ["--shared-memory", ""] if apart else []
        follower = run(*failing, "draft_service", *follow, *draft_options)
        # On another host than the verifier: all that it says passes the wires.
        peers = ["--verifier", to_verifier.address, "--port", "0"]
        gateway = run("-m", "gateway", *peers, *gateway_options)
        built = System(directory, verifier, follower, gateway, to_verifier, activations, ports)
        stack.callback(built.stop)
        eventually(built.is_whole, within=SILENCE)
        yield built


def _kill(service: Service) -> None:
    with suppress(ProcessLookupError):
        service.process.kill()
