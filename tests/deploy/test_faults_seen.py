"""What an operator sees of a fault: the panel that leaves green, within 30 s, in a real Prometheus.

It takes minutes: `make faults-seen`.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.deploy.prometheus import Prometheus, colour, prometheus
from tests.deploy.test_dashboards import PANELS, targets_of
from tests.faults.history import Load, bodies
from tests.faults.system import System, system
from tests.gateway.conftest import eventually
from tests.gateway.rounds.test_automatic_k import self_draft

SEEN_WITHIN = 30.0
GATEWAY = ["--k", "4", "--max-batch", "4", "--max-waiting", "24", "--draft-deadline", "1"]
# Nine pages of 128 positions: what runs always needs four at most.
VERIFIER = ["--stuck-seconds", "3", "--cache-gb", "0.00149"]
# Longer than it takes on a machine that does other things too: no block falls back without a fault.
DRAFT = ["--wait-ms", "1000"]
# Each way: a ping there and back must end within its 2 s.
SLOW = 0.7
LONG_PROMPT = list(range(10, 350))
# Three pages each, and soon four: there is no room for three such.
LARGE = {"prompt": LONG_PROMPT, "n": 4, "max_tokens": 100}


@contextmanager
def killed(whole: System, name: str) -> Iterator[None]:
    getattr(whole, name).kill()
    yield
    whole.revive(name)


@contextmanager
def frozen(whole: System, name: str) -> Iterator[None]:
    getattr(whole, name).process.send_signal(signal.SIGSTOP)
    yield
    getattr(whole, name).process.send_signal(signal.SIGCONT)


@contextmanager
def late(whole: System, wire: str, seconds: float) -> Iterator[None]:
    getattr(whole, wire).latency = seconds
    yield
    getattr(whole, wire).latency = 0.0


@contextmanager
def asked(whole: System, clients: int, **body: object) -> Iterator[None]:
    """So many clients ask at once, again and again."""
    going = True

    def client(http: httpx.Client) -> None:
        while going:
            with suppress(httpx.HTTPError):
                http.post("/v1/completions", json={"prompt": "Once upon", "ignore_eos": True} | body)
            time.sleep(0.1)

    with httpx.Client(base_url=whole.url, timeout=120) as http, ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(client, http)
        try:
            yield
        finally:
            going = False


def overloaded(whole: System) -> AbstractContextManager[None]:
    return asked(whole, 2, n=10, max_tokens=110)


@contextmanager
def numbers_go_bad(whole: System) -> Iterator[None]:
    with whole.failpoint("nan"), asked(whole, 1, seed=13, max_tokens=32):
        yield


@contextmanager
def activations_come_too_late(whole: System) -> Iterator[None]:
    """Of long prompts, so that much is missing until they have come."""
    with whole.failpoint("behind"), asked(whole, 1, prompt=LONG_PROMPT, n=2, max_tokens=20):
        yield


@contextmanager
def first_tokens_come_slowly(whole: System) -> Iterator[None]:
    with late(whole, "to_verifier", SLOW), asked(whole, 2, max_tokens=1):
        yield


@dataclass(frozen=True)
class Fault:
    """`legend`: which of the panel's queries; `series`: what the labels of one of its values hold."""

    panel: str
    legend: str
    series: str
    inject: Callable[[System], AbstractContextManager[None]]


TABLE = {
    "a draft is killed": Fault("overview: Services", "", "'draft'", lambda whole: killed(whole, "draft")),
    "a draft is frozen": Fault("services: Circuit", "", "'draft'", lambda whole: frozen(whole, "draft")),
    "a draft answers too late": Fault("services: Fallbacks", "", "", lambda whole: late(whole, "activations", 1.5)),
    "activations come too late": Fault("services: Draft staleness", "p95", "", activations_come_too_late),
    "a draft guesses at random": Fault(
        "speculation: Acceptance by position", "", "'position': '0'", lambda whole: whole.failpoint("lies")
    ),
    "a verifier is killed": Fault("overview: Peers", "", "'verifier'", lambda whole: killed(whole, "verifier")),
    "a verifier is lost with its sequences": Fault(
        "services: Sequences lost", "", "", lambda whole: killed(whole, "verifier")
    ),
    "a verifier's model is stuck": Fault("overview: Peers", "", "'verifier'", lambda whole: whole.failpoint("stuck")),
    "the wire to the verifier is slow": Fault(
        "services: Round time", "p95", "", lambda w: late(w, "to_verifier", SLOW)
    ),
    "tokens come slowly": Fault("overview: Inter-token latency", "p95", "", lambda w: late(w, "to_verifier", SLOW)),
    "first tokens come slowly": Fault("overview: Time to first token", "p95", "", first_tokens_come_slowly),
    "the target's numbers go bad": Fault("overview: Errors", "", "", numbers_go_bad),
    "more is asked than is served": Fault("overview: Waiting", "", "", overloaded),
    "those who wait wait long": Fault("overview: Queue time", "p95", "", overloaded),
    "the queue is full": Fault("overview: Refused", "", "", lambda whole: asked(whole, 4, n=16, max_tokens=110)),
    "the cache is full": Fault("services: Cache", "cache", "", lambda whole: asked(whole, 1, **LARGE)),
    "memory runs out": Fault("services: Preemptions", "", "", lambda whole: asked(whole, 1, **LARGE)),
}


@pytest.fixture(scope="module")
def watched(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Prometheus]]:
    """A system whose draft guesses well, under a light load, and its Prometheus."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    draft = self_draft(stories_dir, tmp_path_factory.mktemp("draft"))
    with (
        system(
            stories_dir, draft, gateway_options=GATEWAY, verifier_options=VERIFIER, draft_options=DRAFT, apart=True
        ) as whole,
        Load(whole.url, bodies(2, max_tokens=110), repeat=True) as load,
    ):
        eventually(lambda: any(record.ends for record in load.records), within=90)
        with prometheus(targets_of(whole), tmp_path_factory.mktemp("prometheus")) as server:
            yield whole, server


def seen(server: Prometheus, fault: Fault) -> list[str]:
    """The colours of the values that the fault is about."""
    panel = PANELS[fault.panel]
    values = [
        value
        for target in panel["targets"]
        if target["legendFormat"].startswith(fault.legend)
        for labels, value in server.query(target["expr"]).items()
        if fault.series in labels and value == value
    ]
    return [colour(panel, value) for value in values]


def told(server: Prometheus, fault: Fault) -> str:
    """What was seen in the end, and what clients were answered meanwhile."""
    answers = server.query("sum by (status) (increase(spire_http_responses_total[30s])) > 0")
    return f"{fault.panel} is {seen(server, fault) or 'empty'}; answers by status: {answers}"


def comes_true(what: Callable[[], bool], within: float) -> bool:
    """Whether it does, in so many seconds."""
    deadline = time.monotonic() + within
    while not (true := what()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return true


@pytest.mark.slow
@pytest.mark.parametrize("fault", TABLE.values(), ids=TABLE)
def test_a_fault_is_seen_in_its_panel_within_30_s(watched: tuple[System, Prometheus], fault: Fault) -> None:
    whole, server = watched
    eventually(whole.is_whole, within=60)
    assert comes_true(lambda: set(seen(server, fault)) == {"green"}, 120), told(server, fault)
    try:
        with fault.inject(whole):
            assert comes_true(lambda: bool(colours := seen(server, fault)) and "green" not in colours, SEEN_WITHIN), (
                told(server, fault)
            )
    finally:
        whole.heal()


def test_every_panel_with_thresholds_has_a_fault_or_a_reason() -> None:
    """A panel whose colours nothing was seen to change promises what nobody knows."""
    without = {
        "services: Busy": "depends on what else the machine does",
        "services: Memory of what is allowed": "a test that fills a machine's memory ends more than itself",
        "speculation: Multiplier": "its ten minutes outlast any fault here: see alerts.test.yml",
        "speculation: τ": "its colours are those of acceptance",
    }
    coloured = {
        name for name, panel in PANELS.items() if len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1
    }
    assert coloured == {fault.panel for fault in TABLE.values()} | set(without)
