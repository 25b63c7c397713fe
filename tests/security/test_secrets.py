"""What no log, metric or error may hold, and what logs must: the id of a request, through all three services."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from spire.service.keys import create_key
from tests.gateway.conftest import eventually
from tests.services import Service, running
from tests.verifier_service.harness import free_port

# Nothing else says it, whatever a library makes of letters, and no client but this one comes from that address.
MARKER = "Quokka Zanzibar"
CLIENT_ADDRESS = "127.0.0.77"
GREEDY = {"max_tokens": 8, "temperature": 0}


@dataclass
class Watched:
    """Services that log all they can."""

    url: str
    services: dict[str, Service]
    metrics: list[str]
    key: str

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        transport = httpx.HTTPTransport(local_address=CLIENT_ADDRESS)
        return httpx.Client(base_url=self.url, headers=headers, transport=transport, timeout=60)

    def logs(self) -> dict[str, str]:
        return {name: service.log.read_text() for name, service in self.services.items()}


@pytest.fixture(scope="module")
def watched(
    stories_chat_dir: Path, stories_draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    file, loud = tmp_path_factory.mktemp("keys") / "keys", ["--log-level", "debug"]
    key = create_key("alice", file)
    ports = [free_port(), free_port()]
    verifier, draft = ([*loud, "--metrics-port", str(port)] for port in ports)
    gateway = [*loud, "--keys", str(file), "--verifier-patience", "0.5"]
    with running(
        stories_chat_dir,
        stories_draft_dir,
        verifier_options=verifier,
        draft_options=draft,
        gateway_options=gateway,
    ) as services:
        assert services.draft
        processes = {"verifier": services.verifier, "draft": services.draft, "gateway": services.gateway}
        pages = [f"http://127.0.0.1:{port}/metrics" for port in ports]
        system = Watched(services.url, processes, pages, key)
        with system.client() as http:
            eventually(lambda: http.get("/ready").json().get("draft") == "connected")
        yield system


def complete(http: httpx.Client, request_id: str | None = None, **changes: Any) -> httpx.Response:
    body = {"prompt": "Once upon a time", **GREEDY} | changes
    return http.post("/v1/completions", json=body, headers={"X-Request-Id": request_id} if request_id else None)


def whole_lines(log: str) -> list[str]:
    """Those that have been written to their end."""
    return [line for line in log.splitlines(keepends=True) if line.endswith("\n")]


# -- the request's id ------------------------------------------------------------------------------------------------


def found_in(watched: Watched, request_id: str) -> dict[str, list[str]]:
    """What each service's log says of a request."""
    return {
        name: [json.loads(line)["event"] for line in whole_lines(log) if request_id in line]
        for name, log in watched.logs().items()
    }


def test_a_request_is_found_by_its_id_in_the_logs_of_all_three_services(watched: Watched) -> None:
    with watched.client() as http:
        answer = complete(http, "trace-me-42", n=2)
    assert answer.headers["x-request-id"] == "trace-me-42"
    life = ["sequence begins", "sequence ends"]
    for service in ("verifier", "draft"):
        eventually(lambda name=service: sorted(found_in(watched, "trace-me-42")[name]) == sorted(2 * life))
    assert found_in(watched, "trace-me-42")["gateway"] == ["completion begins", "answered"]


def test_the_gateways_request_id_and_the_keys_name_are_found_in_the_logs(watched: Watched) -> None:
    with watched.client() as http:
        request_id = complete(http).headers["x-request-id"]
    eventually(lambda: all(found_in(watched, request_id).values()))
    line = next(line for line in whole_lines(watched.logs()["gateway"]) if request_id in line and "answered" in line)
    assert json.loads(line)["key"] == "alice"


def test_a_sequence_that_the_verifier_refuses_is_found_by_the_request_s_id(watched: Watched) -> None:
    with watched.client() as http:
        assert complete(http, "refuse-me", guided_regex="(").status_code == 400
    eventually(lambda: found_in(watched, "refuse-me")["verifier"] == ["refused"])
    assert found_in(watched, "refuse-me")["gateway"][-1] == "answered"


CRAFTED = [
    b"A" * 10_000,
    b"AAAA\tBBBB",
    b"AAAA BBBB",
    b"",
    b"AAAA\xff\xfe",
    b"AAAA\r\n BBBB",
    b'","event":"forged',
    b"{}\\n",
]


@pytest.mark.parametrize("value", CRAFTED, ids=range(len(CRAFTED)))
def test_a_crafted_request_id_does_no_harm(value: bytes, watched: Watched) -> None:
    body = json.dumps({"prompt": "Once upon a time", **GREEDY}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {watched.key}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nX-Request-Id: "
    parts = urlsplit(watched.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(head.encode() + value + b"\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    status = answer.split()[1]
    # A line that is folded or no text at all is no HTTP to the server, and that is an answer too.
    assert status in ("200", "400"), answer
    echoed = [line.partition(": ")[2] for line in answer.splitlines() if line.lower().startswith("x-request-id")]
    if status == "200":
        assert len(echoed) == 1
        assert len(echoed[0]) <= 128
        assert "AAAA" not in echoed[0]
    for log in watched.logs().values():
        assert "AAAA" not in log
        lines = [json.loads(line) for line in whole_lines(log)]
        assert not [line for line in lines if line["event"] == "forged"]


# -- prompts, keys, addresses ----------------------------------------------------------------------------------------


def abandoned(http: httpx.Client) -> httpx.Response:
    with http.stream("POST", "/v1/completions", json={"prompt": MARKER, "max_tokens": 400, "stream": True}) as response:
        next(response.iter_lines())
        return httpx.Response(response.status_code, text="")


def of_a_dead_verifier(watched: Watched) -> Callable[[httpx.Client], httpx.Response]:
    """It dies in the middle of a stream and does not come back."""

    def request(http: httpx.Client) -> httpx.Response:
        body = {"prompt": MARKER, "max_tokens": 480, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            watched.services["verifier"].kill()
            events = [line for line in lines if '"error"' in line]
        assert events
        return httpx.Response(500, text="".join(events))

    return request


def exchanges(watched: Watched) -> list[Callable[[httpx.Client], httpx.Response]]:
    def post(path: str = "/v1/completions", /, **body: Any) -> Callable[[httpx.Client], httpx.Response]:
        return lambda http: http.post(path, json=body)

    def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content, **more}]}

    chat = "/v1/chat/completions"
    return [
        post(prompt=MARKER, **GREEDY, echo=True, logprobs=1),
        post(prompt=MARKER, **GREEDY, stream=True),
        post(prompt=[MARKER, MARKER], **GREEDY, user=MARKER, stop=MARKER),
        post(chat, **said("user", MARKER), **GREEDY),
        post("/tokenize", prompt=MARKER),
        abandoned,
        post(prompt=MARKER, max_tokens=-1),
        post(prompt=MARKER * 200, max_tokens=4),
        post(prompt=[MARKER, 5]),
        post(prompt={"text": MARKER}),
        post(prompt=[[MARKER]]),
        post(prompt=MARKER, stop=[MARKER, 5]),
        post(prompt=MARKER, suffix=MARKER),
        post(prompt=MARKER, temperature="hot"),
        post(prompt=MARKER, speculation={"draft": "nobody"}),
        post(prompt=MARKER, model="other"),
        post(prompt=MARKER, guided_regex="("),
        post(prompt=MARKER, logit_bias={"x": 1}),
        post("/tokenize", prompt=[MARKER]),
        post(chat, **said("nobody", MARKER)),
        post(chat, **said("user", [MARKER])),
        post(chat, **said("user", {"text": MARKER})),
        post(chat, messages=[MARKER]),
        post(chat, messages=MARKER),
        lambda http: http.post("/v1/completions", content=json.dumps({"prompt": MARKER}).encode() + b"}"),
        lambda http: http.post("/v1/completions", content=b'{"prompt": "' + MARKER.encode() + b'\xff"}'),
        lambda http: http.post("/v1/completions", content=MARKER.encode() * 200_000),
        lambda http: http.post("/v1/chat/completions", content=MARKER.encode()),
        lambda http: http.get(f"/{MARKER}", params={"q": MARKER}),
        of_a_dead_verifier(watched),
        post(prompt=MARKER, **GREEDY),
    ]


@pytest.mark.fault(25)
def test_no_log_metric_or_error_holds_a_prompt_a_key_or_a_client_s_address(watched: Watched) -> None:
    wrong = f"spire-{MARKER.replace(' ', '')}"
    answers, metrics = [], []
    with watched.client() as http, watched.client(wrong) as stranger:
        assert stranger.post("/v1/completions", json={"prompt": MARKER}).status_code == 401
        answers.append(stranger.get("/ready"))
        for exchange in exchanges(watched)[:-2]:
            answers.append(exchange(http))
        # Who sends a broken grammar is told what is wrong with it; nobody else is.
        for kind in ("guided_regex", "guided_json", "guided_grammar"):
            assert complete(http, **{kind: f"({MARKER}"}).status_code == 400
        metrics = [http.get("/metrics").text, *(httpx.get(page).text for page in watched.metrics)]
        answers += [exchange(http) for exchange in exchanges(watched)[-2:]]
        metrics.append(http.get("/metrics").text)
    errors = [answer.text for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404, 413, 503}
    assert len(errors) > 20
    assert any(MARKER in answer.text for answer in answers if answer.status_code == 200)

    inside = [service.address for service in watched.services.values()]
    assert not [text for text in errors if any(address in text for address in inside)]
    logs = watched.logs()
    for name in logs:
        eventually(lambda name=name: "sequence" in watched.logs()[name])
    words = MARKER.split()
    for text in [*logs.values(), *metrics, *errors]:
        assert not [word for word in words if word in text], text
        assert watched.key not in text
        assert CLIENT_ADDRESS not in text
    for log in logs.values():
        assert all(json.loads(line)["event"] for line in whole_lines(log))
    assert "unreachable" in logs["gateway"]


def test_what_a_library_logs_is_json_without_what_its_exception_quotes() -> None:
    program = f"""
import logging
from spire.service.process import ServiceConfig, run

async def serve(config):
    try:
        raise ValueError({MARKER!r})
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it broke")

run("probe", ServiceConfig, serve)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    logged = json.loads(line)
    assert (logged["event"], logged["logger"], logged["level"]) == ("it broke", "uvicorn.error", "error")
    assert logged["exception"].endswith("ValueError")
    assert MARKER not in line
