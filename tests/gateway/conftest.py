"""The three real services around stories260K, once for all tests that leave them as they found them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.services import Services, running

OFF = {"draft": "off"}


class Api:
    """One running gateway, as its clients see it."""

    def __init__(self, url: str):
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=240)

    def post(self, **request: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=request)

    def complete(self, prompt: object, **request: Any) -> dict[str, Any]:
        response = self.post(prompt=prompt, **request)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def text(self, prompt: object, **request: Any) -> str:
        text: str = self.complete(prompt, **request)["choices"][0]["text"]
        return text

    def metric(self, name: str, /, **labels: str) -> float:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no sample of {name}"
        return sum(found)

    def ready(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/ready").json()
        return answer


def events(response: httpx.Response) -> list[Any]:
    """What a stream said, its end mark checked and left out."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def stream(api: Api, prompt: object, **request: Any) -> list[Any]:
    body = {"prompt": prompt, "stream": True} | request
    with api.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def eventually(true: Callable[[], bool], within: float = 60.0) -> float:
    """Seconds until it became true; fails when it does not."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < within, f"not true within {within} s"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture(scope="session")
def services(stories_dir: Path, stories_draft_dir: Path) -> Iterator[Services]:
    with running(stories_dir, stories_draft_dir) as system:
        yield system


@pytest.fixture(scope="session")
def api(services: Services) -> Api:
    return Api(services.url)
