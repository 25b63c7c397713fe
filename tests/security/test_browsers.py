"""A gateway without keys is not driven by whatever page its user's browser shows; its own page and programs go on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st

from gateway.errors import ForeignPage, NotJson
from gateway.http.browsers import ForeignPages
from spire.service.keys import create_key
from tests.services import start

BODY = json.dumps({"prompt": "x"}).encode()
JSON = {"Content-Type": "application/json"}
PATH = "/v1/completions"
FRIEND = "https://friend.example"
ALONE = ["-m", "gateway", "--verifier", "127.0.0.1:9", "--startup-patience", "0", "--port", "0"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Alone, on loopback, without keys: a body that is let in gets 503, there is no verifier."""
    service = start(
        [*ALONE, "--allow-host", "models.lan", "--allow-host", "desk", "--cors-origins", FRIEND],
        tmp_path_factory.mktemp("gateway"),
    )
    with httpx.Client(base_url=f"http://{service.address}") as http:
        yield http
    service.stop()


@pytest.mark.fault(37)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "sent", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"]
)
def test_a_body_that_is_not_declared_json_is_refused(path: str, sent: str | None, gateway: httpx.Client) -> None:
    answer = gateway.post(path, content=BODY, headers={"Content-Type": sent} if sent else {})
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("sent", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_a_body_that_is_declared_json_is_read(sent: str, gateway: httpx.Client) -> None:
    assert gateway.post("/v1/completions", content=BODY, headers={"Content-Type": sent}).status_code == 503


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.7", "[::2]:80"]
)
def test_a_name_that_is_not_this_machine_s_is_refused(host: str, gateway: httpx.Client) -> None:
    for method, path in (("GET", "/metrics"), ("GET", "/"), ("POST", "/v1/completions")):
        answer = gateway.request(method, path, headers={"Host": host} | JSON)
        assert answer.status_code == 403
        assert "--allow-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "127.0.0.1:9", "127.8.0.1", "[::1]:8000", "app.localhost", "DESK:1", "models.lan"],
)
def test_this_machine_s_names_and_those_that_were_allowed_are_served(host: str, gateway: httpx.Client) -> None:
    assert gateway.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost", "http://["]
)
def test_a_page_of_another_origin_is_refused(origin: str, gateway: httpx.Client) -> None:
    for method, path in (("GET", "/metrics"), ("POST", "/v1/completions")):
        answer = gateway.request(method, path, headers={"Origin": origin} | JSON, content=BODY)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "foreign_page"


def test_the_gateway_s_own_page_and_named_origins_are_let_in(gateway: httpx.Client) -> None:
    for origin in (str(gateway.base_url), FRIEND):
        answer = gateway.post("/v1/completions", content=BODY, headers={"Origin": origin.rstrip("/")} | JSON)
        assert answer.status_code == 503


def test_with_keys_a_name_or_a_type_is_nothing_that_is_asked_for(tmp_path: Path) -> None:
    key = create_key("alice", tmp_path / "keys")
    service = start([*ALONE, "--keys", str(tmp_path / "keys")], tmp_path)
    headers = {"Authorization": f"Bearer {key}", "Host": "models.example"}
    try:
        assert httpx.post(f"http://{service.address}/v1/completions", content=BODY, headers=headers).status_code == 503
    finally:
        service.stop()


def test_a_public_gateway_takes_any_host_name_but_still_requires_json(tmp_path: Path) -> None:
    service = start([*ALONE, "--host", "0.0.0.0", "--without-keys"], tmp_path)
    url, headers = service.address.replace("0.0.0.0", "http://127.0.0.1"), {"Host": "gateway:8000"}
    try:
        assert httpx.get(f"{url}/metrics", headers=headers).status_code == 200
        assert httpx.post(f"{url}/v1/completions", content=BODY, headers=headers).status_code == 415
        assert httpx.post(f"{url}/v1/completions", content=BODY, headers=headers | JSON).status_code == 503
    finally:
        service.stop()


def test_the_manual_loads_nothing_from_elsewhere_and_names_every_call(gateway: httpx.Client) -> None:
    page = gateway.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    loaded = re.findall(r"(?:src|href)=\"([^\"#]+)\"", page.text)
    assert set(loaded) == {"/static/page.css", "/openapi.json"}
    document = gateway.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<h2>{method.upper()} {path}</h2>" in page.text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page.text


def scope(method: str = "POST", **headers: str) -> dict[str, Any]:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"method": method, "path": PATH, "headers": sent}


@given(st.from_regex(r"[a-z0-9.\-]{1,40}", fullmatch=True))
def test_no_name_but_loopback_s_is_taken_for_it(name: str) -> None:
    ours = name == "localhost" or name.endswith(".localhost") or re.fullmatch(r"127(\.(0|[1-9]\d{0,2})){3}", name)
    if not ours:
        with pytest.raises(ForeignPage):
            ForeignPages([], [], [PATH]).check(scope("GET", host=f"{name}:8000"))


@given(st.text(st.characters(codec="latin-1"), max_size=40))
def test_no_type_that_a_page_can_send_unasked_is_json(sent: str) -> None:
    """Of these a browser sends to another site without asking it first."""
    for simple in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        with pytest.raises(NotJson):
            ForeignPages([], [], [PATH]).check(
                {"method": "POST", "path": PATH, "headers": [(b"content-type", f"{simple};{sent}".encode("latin-1"))]}
            )
