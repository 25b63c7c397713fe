"""What `make neighbours` calls broken: a planted stall, death, leak or refusal, and nothing where all is well."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from spire.model.cache.pool import Pool
from tests.faults.neighbours.attacks import ATTACKS
from tests.faults.neighbours.clients import Crowd, well_behaved
from tests.faults.neighbours.stack import Gateway, _cache_bytes
from tests.faults.neighbours.verdict import (
    FEWEST_GAPS,
    LONGEST_GAP,
    LONGEST_HEALTH,
    MOST_GROWTH,
    Result,
    growth_of,
    judge,
)
from tests.faults.neighbours.watch import Seen, Watch, mean_step

WELL = Seen(
    gaps=[0.01] * 1000, first_tokens=[0.05], health=[0.01] * 100, longest_step=0.02, peak_besides_cache=100_000_000
)


def judged(seen: Seen, lost: list[str] | None = None) -> Result:
    before = Seen(peak_besides_cache=WELL.peak_besides_cache)
    return judge("an attack", "", WELL, (before, seen), lost=lost or [])


def test_nothing_is_broken_beside_an_attack_that_changes_nothing() -> None:
    assert judged(WELL).broken == []


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (replace(WELL, gaps=[0.01] * 980 + [0.06] * 20), "gap of 0.06 s over 0.05 s"),
        (replace(WELL, gaps=[0.01] * 980 + [1.5] * 20, longest_step=5.0), "over 1.00 s"),
        (replace(WELL, health=[0.01] * 1000 + [0.6]), "/health after 0.60 s"),
        (replace(WELL, failures=["the victim: 503"]), "the victim: 503"),
        (replace(WELL, gaps=[0.01] * (FEWEST_GAPS - 1)), "pieces of text"),
    ],
    ids=["gap", "second", "health", "failure", "silence"],
)
def test_what_a_victim_suffers_is_broken(seen: Seen, says: str) -> None:
    (broken,) = judged(seen).broken
    assert says in broken


def test_a_service_that_was_started_again_is_broken() -> None:
    assert judged(WELL, lost=["gateway"]).broken == ["lost: gateway"]


def test_memory_added_by_a_second_attack_is_broken() -> None:
    assert judged(replace(WELL, peak_besides_cache=102_000_000)).broken == ["memory grew by 2.0%"]
    assert judged(replace(WELL, peak_besides_cache=100_900_000)).broken == []


def test_a_peak_by_chance_is_no_growth_and_a_leak_is() -> None:
    by_chance, leaking = ([Seen(peak_besides_cache=peak) for peak in peaks] for peaks in (CHANCE, LEAK))
    assert growth_of(by_chance[:3]) > MOST_GROWTH >= growth_of(by_chance)
    assert all(growth_of(leaking[:times]) > MOST_GROWTH for times in range(3, 7))


CHANCE = [500_000_000, 480_000_000, 510_000_000, 505_000_000]
LEAK = [int(500_000_000 * 1.011**time_) for time_ in range(6)]


def test_only_what_the_cache_has_written_is_left_out_of_memory() -> None:
    pools = [Pool((64, 4, 8192, 32), torch.float32, "cpu") for _ in range(2)]  # 256 MiB each
    before = _cache_bytes(os.getpid())
    pools[0].tensor[:16] = 1.0
    other = torch.ones(1 << 24)  # 64 MiB
    assert _cache_bytes(os.getpid()) - before == 64 << 20
    del pools, other


def test_a_step_that_counts_for_two_kinds_is_one() -> None:
    before = {name: {"verify": 0.0, "prefill": 0.0} for name in (STEPS, SECONDS)}
    now = {STEPS: {"verify": 1.0, "prefill": 1.0}, SECONDS: {"verify": 0.1, "prefill": 0.3}}
    assert mean_step(before, now) == pytest.approx(0.4)


STEPS, SECONDS = "spire_verifier_steps_total", "spire_verifier_busy_seconds_total"


@contextmanager
def stalling(stalls: threading.Event) -> Iterator[Gateway]:
    """A gateway whose every answer is 20 pieces of text. While `stalls` is set nobody there does anything."""

    class Serves(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._stall()
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for piece in range(20):
                if piece == 10:
                    self._stall()
                self.wfile.write(f"data: {json.dumps({'choices': []})}\n\n".encode())

        def _stall(self) -> None:
            while stalls.is_set():
                stalled.set()
                over.wait(0.01)

        def log_message(self, *_: object) -> None:
            pass

    stalled, over = threading.Event(), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Serves)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Gateway(f"http://127.0.0.1:{server.server_address[1]}", "a-key", 2048)
    finally:
        stalls.clear()
        server.shutdown()
        server.server_close()


def test_a_planted_stall_is_seen_in_the_gaps_and_at_health() -> None:
    stalls = threading.Event()
    with stalling(stalls) as gateway, Watch(gateway) as watch:
        while not watch.seen.gaps:
            threading.Event().wait(0.01)
        stalls.set()
        threading.Event().wait(LONGEST_GAP + LONGEST_HEALTH)
        stalls.clear()
    assert max(watch.seen.gaps) > LONGEST_GAP
    assert max(watch.seen.health) > LONGEST_HEALTH
    assert watch.seen.failures == []


def test_every_client_of_a_crowd_has_its_turn_and_its_answers_are_counted() -> None:
    with stalling(threading.Event()) as gateway, Crowd(gateway, well_behaved, clients=3, seconds=0.1, seed=1) as crowd:
        pass
    assert crowd.answers.keys() == {"200"}
    assert crowd.answers["200"] >= 3


def test_every_attack_says_what_it_does() -> None:
    assert len(ATTACKS) >= 10
    assert all(attack.about and attack.clients for attack in ATTACKS.values())
