"""Who is let in: holders of a known key; all others get only health and the page's own files, however they ask."""

from __future__ import annotations

import hmac
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.http.front import Front
from gateway.http.keys import OPEN_PATHS, Guard, Keys
from gateway.metrics import Metrics
from spire.service.keys import create_key, digest
from tests.marks import thoroughly
from tests.paths import ROOT
from tests.security.conftest import Guarded, refused_start
from tests.services import start

STATIC = ROOT / "gateway" / "http" / "static"
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/ready", "/version", "/metrics"]
PATHS += ["/openapi.json", "/docs", "/redoc", "/nowhere", "/static", "/static/", "/index.html"]


def assert_unauthorized(answer: httpx.Response) -> None:
    assert answer.status_code == 401, answer.text
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.fault(23)
def test_every_path_but_health_and_the_page_needs_a_known_key(guarded: Guarded) -> None:
    wrong = create_key("mallory", guarded.file.with_name("another"))
    with httpx.Client(base_url=guarded.url) as http:
        for path in PATHS:
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                without = http.request(method, path)
                assert without.status_code == 401
                assert http.request(method, path, headers={"Authorization": f"Bearer {wrong}"}).status_code == 401
                assert http.request(method, path, headers=guarded.headers).status_code != 401
            assert_unauthorized(http.get(path))
        assert http.get("/health").json() == {"status": "ok"}


def test_the_page_s_own_files_are_all_that_is_open_beside_health(guarded: Guarded) -> None:
    files = {f"/static/{file.name}" for file in STATIC.iterdir()} - {"/static/index.html"}
    assert len(files) > 3
    assert {"/health", "/"} | files == OPEN_PATHS
    with httpx.Client(base_url=guarded.url) as http:
        for path in OPEN_PATHS:
            assert http.get(path).status_code == 200
            assert http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 200
            assert_unauthorized(http.get(f"{path}x"))
            assert_unauthorized(http.get(f"{path.rstrip('/')}/../metrics"))
        assert http.post("/", content=b"{}").status_code == 405


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer alice",
        "Basic {key}",
        "{key}",
        "Bearer {key}x",
        "Bearer {key} {key}",
        "Bearer {digest}",
        "Bearer spire-",
    ],
)
def test_no_other_header_opens(value: str, guarded: Guarded) -> None:
    filled = value.format(key=guarded.key, digest=digest(guarded.key.encode()).hex())
    answer = httpx.get(f"{guarded.url}/ready", headers={"Authorization": filled})
    assert_unauthorized(answer)
    assert guarded.key not in answer.text


def test_two_headers_of_which_one_is_right_do_not_open(guarded: Guarded) -> None:
    two = [("Authorization", "Bearer wrong"), *guarded.headers.items()]
    assert_unauthorized(httpx.get(f"{guarded.url}/ready", headers=two))
    assert_unauthorized(httpx.get(f"{guarded.url}/ready", headers=two[::-1]))


CRAFTED = [
    "GET /ready HTTP/1.1\r\nHost: localhost/health?",
    "GET /ready HTTP/1.1\r\nHost: x/health#",
    "GET /ready HTTP/1.1\r\nHost: /health",
    "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1/health/../",
    "GET /metrics HTTP/1.1\r\nHost: h\r\nX-Forwarded-Host: h/health\r\nX-Forwarded-Prefix: /health",
    "GET /metrics HTTP/1.1\r\nHost: h\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health",
    "GET http://h/health HTTP/1.1\r\nHost: h",
    "GET http://h/metrics HTTP/1.1\r\nHost: h/health",
    "GET //health HTTP/1.1\r\nHost: h",
    "GET //h/metrics HTTP/1.1\r\nHost: h",
    "GET /health/ HTTP/1.1\r\nHost: h",
    "GET /health/../metrics HTTP/1.1\r\nHost: h",
    "GET /health/%2e%2e/metrics HTTP/1.1\r\nHost: h",
    "GET /health%2f..%2fmetrics HTTP/1.1\r\nHost: h",
    "GET /health%3f/../metrics HTTP/1.1\r\nHost: h",
    "GET /health%00 HTTP/1.1\r\nHost: h",
    "GET /health;/metrics HTTP/1.1\r\nHost: h",
    "GET /metrics?/health HTTP/1.1\r\nHost: h",
    "GET /metrics#/health HTTP/1.1\r\nHost: h",
    "GET /static/../metrics HTTP/1.1\r\nHost: h",
    "GET /static/page.js/../../metrics HTTP/1.1\r\nHost: h",
    "GET /static/%2e%2e/keys.py HTTP/1.1\r\nHost: h",
    "GET /static/../keys.py HTTP/1.1\r\nHost: h/static/page.js",
    "GET // HTTP/1.1\r\nHost: h",
    "GET /HEALTH HTTP/1.1\r\nHost: h",
    "GET /ready HTTP/1.0",
]


def exchange(url: str, request: str) -> str:
    """What comes back for these very bytes, until the other side closes."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(f"{request}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@pytest.mark.parametrize("request_head", CRAFTED)
@pytest.mark.fault(23)
def test_a_crafted_host_or_path_does_not_open(request_head: str, guarded: Guarded) -> None:
    answer = exchange(guarded.url, request_head)
    assert answer.startswith("HTTP/1.1 401 "), answer
    assert "invalid_api_key" in answer


def test_health_is_open_however_its_host_is_called(guarded: Guarded) -> None:
    for host in ("h", "h/metrics", "/metrics?"):
        assert exchange(guarded.url, f"GET /health HTTP/1.1\r\nHost: {host}").startswith("HTTP/1.1 200 ")


def test_who_sends_much_without_a_key_reads_why_not(guarded: Guarded) -> None:
    for size in (10_000, 1_900_000, 5_000_000):
        assert_unauthorized(httpx.post(f"{guarded.url}/v1/completions", content=b"x" * size))


def test_a_browser_may_ask_what_it_may_send_and_no_more(tmp_path: Path) -> None:
    create_key("alice", tmp_path / "keys")
    options = ["--port", "0", "--keys", str(tmp_path / "keys"), "--cors-origins", "https://notes.example"]
    gateway = start(["-m", "gateway", "--verifier", "127.0.0.1:9", "--startup-patience", "0", *options], tmp_path)
    try:
        origin = {"Origin": "https://notes.example", "Access-Control-Request-Method": "POST"}
        url = f"http://{gateway.address}/v1/completions"
        asked = httpx.options(url, headers=origin | {"Access-Control-Request-Headers": "authorization"})
        assert asked.status_code == 200
        assert "authorization" in asked.headers["access-control-allow-headers"]
        refused = httpx.post(url, headers=origin)
        assert_unauthorized(refused)
        assert refused.headers["access-control-allow-origin"] == "https://notes.example"
    finally:
        gateway.stop()


async def test_the_name_of_the_key_is_in_the_request_s_state(tmp_path: Path) -> None:
    key, seen = create_key("alice", tmp_path / "keys"), []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    for keys, expected in ((Keys(tmp_path / "keys"), "alice"), (None, None)):
        front = Front(application, Metrics(), Guard(keys), frozenset(), 1024, 1.0)
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"x-request-id", b"mine")]
        await front({"type": "http", "path": "/ready", "method": "GET", "headers": headers}, receive, send)
        assert seen.pop() == {"key_name": expected, "request_id": "mine", "body": b""}


def test_a_key_is_compared_with_every_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = (create_key(name, tmp_path / "keys") for name in ("a", "b", "c"))
    keys, compared, real = Keys(tmp_path / "keys"), [], hmac.compare_digest

    def counting(known: bytes, presented: bytes) -> bool:
        compared.append(known)
        return real(known, presented)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    assert keys.name_of(first.encode()) == "a"
    assert keys.name_of(b"nobody's") is None
    assert len(compared) == 2 * 3


# -- where it listens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", thoroughly("::"), thoroughly("")])
def test_a_gateway_without_keys_refuses_to_serve_other_machines(host: str) -> None:
    message = refused_start("gateway", "--host", host, "--port", "0")
    assert "spire key create NAME --file FILE" in message
    assert "--keys FILE" in message
    assert "--without-keys" in message


@pytest.mark.parametrize("told", ["keys", "without"])
def test_both_ways_out_of_that_refusal_lead_out(told: str, tmp_path: Path) -> None:
    create_key("alice", tmp_path / "keys")
    way = ["--keys", str(tmp_path / "keys")] if told == "keys" else ["--without-keys"]
    options = ["--verifier", "127.0.0.1:9", "--startup-patience", "0", "--host", "0.0.0.0", "--port", "0", *way]
    gateway = start(["-m", "gateway", *options], tmp_path)
    try:
        port = gateway.address.rpartition(":")[2]
        answer = httpx.get(f"http://127.0.0.1:{port}/version")
        assert answer.status_code == (401 if told == "keys" else 200)
    finally:
        gateway.stop()
