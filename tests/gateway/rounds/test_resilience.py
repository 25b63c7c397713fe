"""Services die, freeze and come back; requests do not notice, or are told clearly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Api, eventually
from tests.services import Service, Services, running, start

LONG: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = "Once upon a time"


@pytest.fixture
def fragile(stories_dir: Path, stories_draft_dir: Path) -> Iterator[tuple[Services, Api]]:
    """Services of a test's own, to be broken."""
    with running(stories_dir, stories_draft_dir, patient=False) as system:
        try:
            yield system, Api(system.url)
        finally:
            for service in (system.verifier, system.draft):
                if service is not None and service.process.poll() is None:
                    os.kill(service.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def in_flight(api: Api, requests: int = 4) -> Iterator[list[Future[dict[str, Any]]]]:
    """Long greedy requests that have begun to produce tokens."""
    with ThreadPoolExecutor(requests) as pool:
        before = api.metric("spire_rounds_total")
        futures = [pool.submit(api.complete, PROMPT + " there" * i, **LONG) for i in range(requests)]
        eventually(lambda: api.metric("spire_rounds_total") > before + 20)
        assert not any(future.done() for future in futures)
        yield futures


def plain(api: Api, requests: int = 4) -> list[Any]:
    """What undisturbed decoding without a draft says to the requests of `in_flight`."""
    off = {"draft": "off"}
    return [api.complete(PROMPT + " there" * i, **LONG, speculation=off)["choices"] for i in range(requests)]


def revive(service: Service, directory: Path) -> Service:
    """A new process on the old port."""
    command = service.command.copy()
    command[command.index("--port") + 1] = service.address.rsplit(":", 1)[1]
    return start(command, directory)


@pytest.mark.thorough
@pytest.mark.fault(1)
def test_a_draft_that_dies_costs_speed_and_comes_back(fragile: tuple[Services, Api]) -> None:
    system, api = fragile
    expected = plain(api)
    assert system.draft is not None
    with in_flight(api) as futures:
        system.draft.kill()
        answers = [future.result()["choices"] for future in futures]
    assert answers == expected
    assert api.ready()["status"] == "degraded"
    assert api.metric("spire_fallbacks_total", reason="draft_absent") > 0
    assert api.complete(PROMPT, **LONG)["choices"] == expected[0]

    system.draft = revive(system.draft, system.directory)
    eventually(lambda: api.ready()["status"] == "ready", within=20)
    before = api.metric("spire_draft_tokens_total")
    assert api.complete(PROMPT, **LONG)["choices"] == expected[0]
    assert api.metric("spire_draft_tokens_total") > before


@pytest.mark.thorough
@pytest.mark.fault(2)
def test_a_frozen_draft_is_left_out_of_the_round(fragile: tuple[Services, Api]) -> None:
    system, api = fragile
    expected = plain(api)
    assert system.draft is not None
    with in_flight(api) as futures:
        os.kill(system.draft.process.pid, signal.SIGSTOP)
        answers = [future.result()["choices"] for future in futures]
    assert answers == expected
    assert api.metric("spire_fallbacks_total", reason="draft_timeout") > 0
    os.kill(system.draft.process.pid, signal.SIGCONT)
    eventually(lambda: api.ready()["status"] == "ready", within=20)


@pytest.mark.fault(4)
def test_a_verifier_that_dies_and_returns_costs_no_request(fragile: tuple[Services, Api]) -> None:
    system, api = fragile
    expected = plain(api)
    with in_flight(api) as futures:
        system.verifier.kill()
        system.verifier = revive(system.verifier, system.directory)
        try:
            answers = [future.result()["choices"] for future in futures]
            assert answers == expected
            assert api.metric("spire_replays_total") >= 4
        finally:
            system.verifier.process.terminate()


@pytest.mark.fault(4)
def test_a_stream_in_progress_outlives_its_verifier_without_a_seam(fragile: tuple[Services, Api]) -> None:
    system, api = fragile
    expected = plain(api, requests=1)[0][0]["text"]
    body = {"prompt": PROMPT, "stream": True} | LONG
    with api.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        pieces = [next(lines) for _ in range(20)]
        system.verifier.kill()
        system.verifier = revive(system.verifier, system.directory)
        try:
            pieces += list(lines)
        finally:
            system.verifier.process.terminate()
    events = [json.loads(line[6:]) for line in pieces if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_without_a_verifier_requests_are_told_to_come_back_later(fragile: tuple[Services, Api]) -> None:
    system, api = fragile
    system.verifier.kill()
    eventually(lambda: api.http.get("/ready").status_code == 503)
    refused = api.post(prompt="x")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "no_verifier"
    assert api.http.get("/health").status_code == 200
    assert api.metric("spire_peer_up", peer="verifier") == 0


@pytest.mark.fault(4)
def test_requests_in_flight_fail_clearly_when_no_verifier_comes_back(stories_dir: Path) -> None:
    with running(stories_dir, gateway_options=["--verifier-patience", "0.5"]) as system:
        api = Api(system.url)
        body = {"prompt": PROMPT, "stream": True} | LONG
        with ThreadPoolExecutor(1) as pool, api.http.stream("POST", "/v1/completions", json=body) as response:
            whole = pool.submit(api.post, prompt=PROMPT, **LONG)
            lines = response.iter_lines()
            next(lines)
            eventually(lambda: api.metric("spire_sequences_now", state="running") == 2)
            system.verifier.kill()
            *_, error, done = [line for line in lines if line]
            refused = whole.result()
    assert json.loads(error[6:])["error"]["code"] == "no_verifier"
    assert done == "data: [DONE]"
    assert refused.status_code == 503


@pytest.mark.thorough
@pytest.mark.fault(15)
def test_a_full_queue_refuses_with_429_and_recovers(stories_dir: Path) -> None:
    with running(stories_dir, gateway_options=["--max-batch", "1", "--max-waiting", "3"]) as system:
        api = Api(system.url)
        plainly = {"verifier": "connected", "draft": "off", "draft_kind": None}
        plainly |= {"max_context": 512, "max_sequences": 64}
        plainly |= {"status": "degraded", "model": stories_dir.name}
        assert plainly.items() <= api.ready().items()
        with ThreadPoolExecutor(2) as pool:
            running_one = pool.submit(api.complete, PROMPT, max_tokens=480, ignore_eos=True)
            eventually(lambda: api.metric("spire_sequences_now", state="running") == 1)
            pool.submit(api.complete, "x", n=2, max_tokens=1)
            eventually(lambda: api.metric("spire_sequences_now", state="waiting") == 2)
            refused = api.post(prompt="x", n=2)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert running_one.result()["usage"]["completion_tokens"] == 480
        assert api.complete("x", n=2)["choices"]


@pytest.mark.fault(22)
def test_sequences_wait_for_a_place_at_a_verifier_that_others_fill(stories_dir: Path) -> None:
    with running(stories_dir, verifier_options=["--max-sequences", "2"]) as system:
        first = Api(system.url)
        second_gateway = start(
            ["-m", "gateway", "--verifier", system.verifier.address, "--port", "0"], Path(system.directory)
        )
        second = Api(f"http://{second_gateway.address}")
        try:
            with ThreadPoolExecutor(8) as pool:
                work = [pool.submit(api.complete, PROMPT, max_tokens=40) for api in (first, second) for _ in range(4)]
                assert all(future.result()["usage"]["completion_tokens"] > 0 for future in work)
        finally:
            assert second_gateway.stop() == 0


def test_sigterm_ends_the_gateway_cleanly_with_a_request_in_flight(fragile: tuple[Services, Api]) -> None:
    system, api = fragile
    request = threading.Thread(target=lambda: api.post(prompt=PROMPT, max_tokens=100), daemon=True)
    request.start()
    time.sleep(0.1)
    assert system.gateway.stop() == 0
    request.join(timeout=5)
    assert not request.is_alive()


def test_importing_the_gateway_imports_no_torch() -> None:
    code = "import sys, gateway.__main__; assert not {'torch', 'numpy'} & set(sys.modules), 'torch or numpy'"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.fault(13)
def test_who_leaves_gives_the_place_at_the_verifier_back(stories_dir: Path) -> None:
    with running(stories_dir, verifier_options=["--max-sequences", "1"]) as system:
        api = Api(system.url)
        for _ in range(3):
            body = {"prompt": PROMPT, "stream": True} | LONG
            with api.http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
            assert api.text(PROMPT, max_tokens=2, temperature=0)
        assert api.metric("spire_sequences_total", finished_reason="abort") == 3
        assert api.metric("spire_generated_tokens_total") < LONG["max_tokens"], "who left did not go on"
