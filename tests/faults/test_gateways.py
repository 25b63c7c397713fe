"""Cases 18, 20, 22 and 24: gateways that end or vanish, a client that gives half of what it says, labels that grow."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import httpx
import pytest

from tests.faults.history import Load, Record, stream_into
from tests.faults.proxy import proxied
from tests.faults.system import System
from tests.gateway.conftest import eventually
from tests.services import Service, start, wait_until_connected

LONG = {"prompt": "Once", "temperature": 0, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}


@contextmanager
def gateway(whole: System, *options: str, verifier: str = "") -> Iterator[Service]:
    """One more gateway at the shared verifier, without a draft."""
    command = ["-m", "gateway", "--verifier", verifier or whole.verifier.address, "--port", "0", *options]
    service = start(command, whole.directory)
    try:
        wait_until_connected(service, {"verifier"})
        yield service
    finally:
        service.kill()


@contextmanager
def far_gateway(whole: System, *options: str) -> Iterator[Service]:
    """One whose rounds take 20 ms and more, so that 400 of them are under way for a while on any machine."""
    with proxied(whole.verifier.address) as wire:
        wire.latency = 0.01
        with gateway(whole, *options, verifier=wire.address) as service:
            yield service


def metric_names(url: str) -> int:
    return len([line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")])


@contextmanager
def streaming(service: Service) -> Iterator[Record]:
    """A request that is under way."""
    record = Record(LONG)
    thread = Thread(target=stream_into, args=(record, f"http://{service.address}"))
    thread.start()
    eventually(lambda: len(record.tokens) > 20 or record.error)
    assert not record.error
    yield record
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.thorough
@pytest.mark.fault(20)
def test_a_gateway_told_to_stop_finishes_its_requests_and_takes_no_more(whole: System) -> None:
    with far_gateway(whole, "--drain-seconds", "60") as service:
        with streaming(service) as record:
            service.process.send_signal(signal.SIGTERM)
            url = f"http://{service.address}"
            eventually(lambda: httpx.get(f"{url}/ready").status_code == 503)
            refused = httpx.post(f"{url}/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["retry-after"]
        assert service.process.wait(20) == 0
    assert (record.error, record.usage, record.finish_reasons, record.ends) == ("", 400, ["length"], 1)
    assert whole.leaks() == {}


@pytest.mark.thorough
@pytest.mark.fault(20)
def test_a_second_signal_ends_it_now_and_tells_the_clients(whole: System) -> None:
    with far_gateway(whole, "--drain-seconds", "60") as service:
        with streaming(service) as record:
            service.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"http://{service.address}/ready").status_code == 503)
            service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
    assert json.loads(record.error)["code"] == "shutting_down"
    assert record.ends == 1
    assert len(record.tokens) < 400
    assert whole.leaks() == {}


@pytest.mark.thorough
@pytest.mark.fault(20)
def test_a_verifier_told_to_end_lets_what_runs_end_first(whole: System) -> None:
    replays = whole.metric("gateway", "spire_replays_total")
    with Load(whole.url, [expected.body for expected in whole.expected.values()]) as load:
        eventually(lambda: load.flowing)
        whole.verifier.process.send_signal(signal.SIGTERM)
    assert whole.wrong(load.records) == {}
    assert whole.metric("gateway", "spire_replays_total") == replays
    assert whole.verifier.process.wait(20) == 0
    whole.revive("verifier")


@pytest.mark.thorough
@pytest.mark.fault(22, 6)
def test_a_gateway_that_vanishes_leaves_only_its_own_sequences_to_free(whole: System) -> None:
    with proxied(whole.verifier.address) as wire, gateway(whole, verifier=wire.address) as gone:
        thread = Thread(target=stream_into, args=(Record(LONG), f"http://{gone.address}"), daemon=True)
        thread.start()
        eventually(lambda: whole.metric("verifier", "spire_verifier_slots_used") == 1)
        wire.black_hole()
        gone.kill()
        assert whole.wrong(whole.ask()) == {}
        expired = lambda: whole.metric("verifier", "spire_verifier_expired_sequences_total")  # noqa: E731
        eventually(lambda: expired() >= 1, within=15)
    assert whole.leaks() == {}


@pytest.mark.fault(18)
def test_a_client_that_sends_half_a_body_is_told_and_cut_off(whole: System) -> None:
    with socket.create_connection(tuple(whole.gateway.address.split(":"))) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: 100\r\n\r\n{")
        client.settimeout(10)
        assert whatever_came(client).startswith(b"HTTP/1.1 408 ")


@pytest.mark.fault(24)
def test_no_request_makes_a_metric_grow_a_label(whole: System) -> None:
    def abuse(attempt: int) -> None:
        with httpx.Client(base_url=whole.url) as client:
            client.get(f"/nowhere/{attempt}", headers={"X-Request-Id": f"id{attempt}"})
            client.get(f"/v1/models/model{attempt}")
            client.request(f"METHOD{attempt}", "/health")
            client.post("/v1/completions", json={"prompt": "x", "model": f"model{attempt}", "user": f"user{attempt}"})
            client.post("/v1/completions", json={"prompt": "x", "speculation": {"draft": f"draft{attempt}"}})

    abuse(0)
    before = metric_names(whole.url)
    for attempt in range(1, 20):
        abuse(attempt)
    assert metric_names(whole.url) == before


def whatever_came(client: socket.socket) -> bytes:
    """To the end, whichever way it came."""
    said = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(65536):
            said += piece
    return said
