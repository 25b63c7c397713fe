"""Who asks too much, too slowly or for too long is answered or closed, and nobody else notices."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.config import GatewayConfig
from tests.gateway.conftest import Api, eventually
from tests.marks import thoroughly
from tests.services import Services, running

PROMPT = "Once upon a time"
CROWDED = ["-m", "tests.crowded_verifier"]
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(stories_dir: Path) -> Iterator[tuple[Services, Api]]:
    """A gateway with little patience, in front of a target that takes 20 ms for a token."""
    options = ["--max-batch", "1", "--max-waiting", "2", "--head-deadline", "2", "--reading-deadline", "0.2"]
    options += ["--max-connections", "12", "--idle-seconds", "12"]
    with running(stories_dir, verifier=CROWDED, gateway_options=options) as services:
        yield services, Api(services.url)


@contextmanager
def connection(api: Api) -> Iterator[socket.socket]:
    url = httpx.URL(api.url)
    with closing(socket.create_connection((url.host, url.port or 80), timeout=20)) as one:
        yield one


@pytest.mark.fault(15)
def test_a_full_queue_tells_when_to_ask_again_by_the_measured_rate(strict: tuple[Services, Api]) -> None:
    _, api = strict
    body = LONG | {"max_tokens": 150}
    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(api.complete, PROMPT, **body)]
        eventually(lambda: api.metric("spire_sequences_now", state="running") == 1)
        work += [pool.submit(api.complete, PROMPT, **body) for _ in range(2)]
        eventually(lambda: api.metric("spire_sequences_now", state="waiting") == 2)
        refused = api.post(prompt=PROMPT)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert all(one.result()["usage"]["completion_tokens"] == body["max_tokens"] for one in work)


@pytest.mark.thorough
@pytest.mark.fault(15)
def test_a_request_facing_a_long_wait_for_others_prefill_is_refused(stories_dir: Path) -> None:
    """They have their places already, so it is no queue for a place."""
    gateway_options, verifier_options = ["--max-queue-seconds", "0.2"], ["--token-budget", "8"]
    with running(stories_dir, gateway_options=gateway_options, verifier_options=verifier_options) as services:
        api = Api(services.url)
        prompts = [[20 + n, *range(300, 500)] for n in range(40)]
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(api.complete, prompts, max_tokens=1)
            eventually(lambda: api.metric("spire_time_to_first_token_seconds_count") >= 3)
            refused = api.post(prompt="x", max_tokens=1)
            assert refused.status_code == 429
            assert api.metric("spire_sequences_now", state="waiting") == 0
            assert "wait for their first token" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 120
            assert len(work.result()["choices"]) == 40
        assert api.complete("x", max_tokens=1)["choices"]


def test_more_choices_than_the_queue_ever_holds_are_refused_for_good(strict: tuple[Services, Api]) -> None:
    _, api = strict
    refused = api.post(prompt=PROMPT, n=3)
    assert refused.status_code == 400
    assert "3 choices" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [thoroughly(False), True])
def test_a_request_ends_at_its_deadline_and_frees_its_place(strict: tuple[Services, Api], stream: bool) -> None:
    _, api = strict
    body = {"prompt": PROMPT, "stream": stream, "n": 2} | LONG
    answer = api.http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "3"})
    assert answer.status_code == (200 if stream else 504)
    assert '"code":"deadline_passed"' in answer.text
    assert "not done within 3 s" in answer.text
    assert not stream or answer.text.endswith("data: [DONE]\n\n")
    eventually(lambda: api.metric("spire_sequences_now", state="running") == 0)
    eventually(lambda: api.metric("spire_sequences_now", state="waiting") == 0)


def test_a_timeout_that_is_none_is_refused(strict: tuple[Services, Api]) -> None:
    _, api = strict
    answer = api.http.post("/v1/completions", json={"prompt": PROMPT}, headers={"X-Request-Timeout": "soon"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize("head", [thoroughly(b""), thoroughly(b"POST /v1/comp"), b"GET /health HTTP/1.1\r\nX-Slow: "])
@pytest.mark.fault(18)
def test_a_head_that_does_not_come_is_not_waited_for(strict: tuple[Services, Api], head: bytes) -> None:
    _, api = strict
    with connection(api) as slow:
        slow.sendall(head)
        began = time.monotonic()
        assert _is_cut_off(slow)
        assert 1 < time.monotonic() - began < 9


@pytest.mark.fault(18)
def test_a_head_that_drips_is_not_waited_for(strict: tuple[Services, Api]) -> None:
    _, api = strict
    with connection(api) as slow:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 9:
                slow.sendall(b"E")
                time.sleep(0.05)
        assert 1 < time.monotonic() - began < 9


def test_a_connection_kept_alive_has_the_deadline_again_for_its_next_head(strict: tuple[Services, Api]) -> None:
    _, api = strict
    with connection(api) as one:
        assert _is_alive(one)
        time.sleep(2.2)
        assert _is_alive(one)
        one.sendall(b"GET /health")
        assert _is_cut_off(one)


@pytest.mark.thorough
def test_an_idle_connection_stays_open_for_the_configured_time(strict: tuple[Services, Api]) -> None:
    """Longer than uvicorn's 5 s, and than its next head may take."""
    _, api = strict
    with connection(api) as one:
        assert _is_alive(one)
        time.sleep(5.5)
        assert _is_alive(one)
        began = time.monotonic()
        assert _is_cut_off(one)
        assert time.monotonic() - began > 5


def test_a_connection_outlives_the_pools_of_clients_unless_told_otherwise() -> None:
    assert GatewayConfig(_cli_parse_args=[]).idle_seconds > 90  # Go's; nginx keeps its own for 60 s


@pytest.mark.thorough
@pytest.mark.fault(14)
def test_a_reader_who_stops_reading_is_dropped_and_others_are_served(strict: tuple[Services, Api]) -> None:
    _, api = strict
    body = b'{"prompt": "Once", "stream": true, "logprobs": 20, "max_tokens": 480, "ignore_eos": true, "n": 2}'
    aborted = api.metric("spire_sequences_total", finished_reason="abort")
    with connection(api) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        stuck.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: api.metric("spire_sequences_now", state="running") == 1)
        assert api.complete(PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3
        eventually(lambda: api.metric("spire_sequences_total", finished_reason="abort") >= aborted + 1)


def _is_alive(one: socket.socket) -> bool:
    one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += one.recv(4096)
    return answer.startswith(b"HTTP/1.1 200")


def _is_cut_off(one: socket.socket) -> bool:
    try:
        return one.recv(4096) == b""
    except ConnectionResetError:
        return True


@pytest.mark.fault(18)
def test_connections_beyond_the_cap_are_closed_and_places_come_back(strict: tuple[Services, Api]) -> None:
    _, api = strict
    api.http.close()
    url = httpx.URL(api.url)
    many = [socket.create_connection((url.host, url.port or 80), timeout=20) for _ in range(30)]
    closed = 0
    for one in many:
        one.settimeout(0.2)
        try:
            closed += one.recv(1) == b""
        except ConnectionResetError:
            closed += 1
        except TimeoutError:
            pass
    assert closed >= 18
    for one in many:
        one.close()
    eventually(lambda: httpx.get(f"{api.url}/health").status_code == 200)


def test_a_key_may_have_so_much_a_minute_and_others_notice_nothing(stories_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    alice, bob = (_key(name, file) for name in ("alice", "bob"))
    options = ["--keys", str(file), "--requests-per-minute", "3", "--tokens-per-minute", "100"]
    with running(stories_dir, gateway_options=options) as services:

        def ask(key: str, **body: object) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{services.url}/v1/completions", json=body, headers=headers, timeout=60)

        assert ask(alice, prompt=PROMPT, max_tokens=300).status_code == 400
        assert [ask(alice, prompt=PROMPT, max_tokens=2).status_code for _ in range(3)] == [200] * 3
        refused = ask(alice, prompt=PROMPT, max_tokens=2)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "3 requests a minute" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        short = {"prompt": PROMPT, "max_tokens": 80, "stop": "a", "temperature": 0}
        # What is promised and not used is given back: twice 80 tokens would be too many.
        assert [ask(bob, **short).status_code for _ in range(2)] == [200, 200]
        refused = ask(bob, prompt=PROMPT, max_tokens=85, ignore_eos=True)
        assert refused.status_code == 429
        assert "100 tokens a minute" in refused.json()["error"]["message"]


def _key(name: str, file: Path) -> str:
    command = [sys.executable, "-m", "spire.cli", "key", "create", name, "--file", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1].strip()
