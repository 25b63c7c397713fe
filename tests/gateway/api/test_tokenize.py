"""`/tokenize` and `/detokenize` over the real services, and who may call from a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Api
from tests.services import start

TEXT = "Once upon a time, Lily's caf\u00e9 was red."


def post(api: Api, path: str, **body: Any) -> httpx.Response:
    return api.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def test_tokens_are_those_a_completion_s_prompt_has(api: Api) -> None:
    answer = post(api, "/tokenize", prompt=TEXT).json()
    completion = api.complete(TEXT, max_tokens=1, return_token_ids=True)
    assert answer["tokens"] == completion["choices"][0]["prompt_token_ids"]
    assert answer["count"] == len(answer["tokens"]) == completion["usage"]["prompt_tokens"]
    assert answer["max_model_len"] == 512
    assert "token_strs" not in answer


def test_tokens_become_the_text_they_were_made_of(api: Api) -> None:
    tokens = post(api, "/tokenize", prompt=TEXT, add_special_tokens=False).json()["tokens"]
    assert post(api, "/detokenize", tokens=tokens).json() == {"prompt": TEXT}
    assert post(api, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_special_tokens_are_put_in_front_and_spelled_out(api: Api) -> None:
    answer = post(api, "/tokenize", prompt=TEXT, return_token_strs=True).json()
    bare = post(api, "/tokenize", prompt=TEXT, add_special_tokens=False).json()
    assert answer["tokens"] == [1, *bare["tokens"]]
    assert answer["token_strs"][:2] == ["<s>", "\u2581Once"]
    assert len(answer["token_strs"]) == answer["count"]
    assert post(api, "/detokenize", tokens=answer["tokens"][:2]).json()["prompt"].startswith("<s>")


def test_a_text_over_the_context_is_counted_and_a_hopeless_one_refused(api: Api) -> None:
    assert post(api, "/tokenize", prompt="word " * 600).json()["count"] > 512
    error = post(api, "/tokenize", prompt="word " * 100_000).json()["error"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ""}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, 512]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["5"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [5], "model": "gpt-9"}, 404, None),
    ],
)
def test_bad_input_is_refused_by_name(api: Api, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = post(api, path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}


def test_a_large_body_is_refused(api: Api) -> None:
    assert post(api, "/tokenize", prompt="x" * 3_000_000).status_code == 413


def test_unknown_fields_are_named(api: Api) -> None:
    assert post(api, "/tokenize", prompt="x", wibble=1).headers["x-spire-ignored"] == "wibble"
    blank: Any = {"": 1, " ": 2, "\n": 3, "x" * 63 + " y": 4}
    assert post(api, "/detokenize", tokens=[5], **blank).headers["x-spire-ignored"] == f"'', \\n, ' ', '{'x' * 63} '"


# -- browsers --------------------------------------------------------------------------------------------------------

PAGE = "https://notes.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}


@pytest.fixture(scope="module")
def open_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A gateway alone that lets one origin in."""
    options = ["--verifier", "127.0.0.1:9", "--startup-patience", "0", "--port", "0", "--cors-origins", PAGE]
    service = start(["-m", "gateway", *options], Path(tmp_path_factory.mktemp("gateway")))
    with httpx.Client(base_url=f"http://{service.address}") as http:
        yield http
    service.stop()


def test_no_page_may_call_unless_its_origin_is_configured(api: Api) -> None:
    assert "access-control-allow-origin" not in api.http.get("/health", headers={"Origin": PAGE}).headers
    assert "access-control-allow-origin" not in api.http.options("/v1/completions", headers=PREFLIGHT).headers


def test_a_configured_page_may_call_and_read_refusals(open_gateway: httpx.Client) -> None:
    allowed = open_gateway.options("/v1/completions", headers=PREFLIGHT)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    too_large = open_gateway.post(
        "/v1/completions", content=b"x" * 3_000_000, headers={"Origin": PAGE, "Content-Type": "application/json"}
    )
    assert (too_large.status_code, too_large.headers["access-control-allow-origin"]) == (413, PAGE)
    assert "X-Request-Id" in too_large.headers["access-control-expose-headers"]


def test_another_page_may_not_call(open_gateway: httpx.Client) -> None:
    headers = {"Origin": "https://other.example"}
    assert "access-control-allow-origin" not in open_gateway.get("/health", headers=headers).headers
    assert open_gateway.options("/v1/completions", headers=PREFLIGHT | headers).status_code == 400
