"""The REST surface over the real services."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.metrics import ROUND_PARTS
from tests.gateway.conftest import OFF, Api, eventually, stream

JSON = {"Content-Type": "application/json"}
PROMPTS = [
    "Once upon a time",
    "The little dog",
    "Tom and Lily went to the park. " * 6,
    "One day, a girl named Sue found a big red ball in the garden. She was so happy that",
    "A",
    "The cat saw a bird in the tree. " * 12,
]


def test_speculative_greedy_text_is_plain_greedy_text_in_a_mixed_batch(api: Api) -> None:
    def both(prompt: str) -> tuple[dict[str, Any], dict[str, Any]]:
        request: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "return_token_ids": True}
        return api.complete(prompt, **request), api.complete(prompt, **request, speculation=OFF)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(both, PROMPTS * 2))
    for drafted, plain in answers:
        assert drafted["choices"] == plain["choices"]
        assert plain["usage"]["completion_tokens_details"] == {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        }
    assert sum(d["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for d, _ in answers) > 0


@pytest.mark.parametrize("k", [0, 1, 3, 16])
def test_every_depth_gives_the_same_greedy_text(api: Api, k: int) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
    assert api.text(PROMPTS[0], **request, speculation={"k": k}) == api.text(PROMPTS[0], **request, speculation=OFF)


def test_a_stream_says_what_the_whole_answer_says(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 11, "return_token_ids": True}
    request["speculation"] = OFF
    whole = api.complete(PROMPTS[1], **request)["choices"][0]
    pieces = stream(api, PROMPTS[1], **request)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["text"]
    assert [token for piece in pieces for token in piece["choices"][0]["token_ids"]] == whole["token_ids"]
    reasons = [piece["choices"][0]["finish_reason"] for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert len(pieces) > 10


def test_usage_comes_last_in_a_stream_that_asks_for_it(api: Api) -> None:
    *pieces, last = stream(api, PROMPTS[0], max_tokens=12, seed=1, stream_options={"include_usage": True})
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert all("usage" not in piece for piece in stream(api, PROMPTS[0], max_tokens=3))


def test_a_seed_repeats_and_choices_differ(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 24, "seed": 7, "n": 4, "speculation": OFF}
    first, second = api.complete(PROMPTS[0], **request), api.complete(PROMPTS[0], **request)
    assert first["choices"] == second["choices"]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in first["choices"]}) == 4
    free = {"max_tokens": 60, "temperature": 1.5}
    assert api.text(PROMPTS[0], **free) != api.text(PROMPTS[0], **free)


def test_many_prompts_are_answered_in_order_whatever_form_they_have(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "return_token_ids": True}
    texts = api.complete(PROMPTS[:3], **request, n=2)
    assert [choice["index"] for choice in texts["choices"]] == list(range(6))
    alone = [api.text(prompt, **request) for prompt in PROMPTS[:3]]
    assert [choice["text"] for choice in texts["choices"]] == [text for text in alone for _ in range(2)]
    ids = [choice["prompt_token_ids"] for choice in texts["choices"]][::2]
    assert texts["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert [c["text"] for c in api.complete(ids, **request)["choices"]] == alone
    assert api.text(ids[1], **request) == alone[1]


def test_a_stop_string_ends_the_text_before_it_at_every_depth(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    full = api.text(PROMPTS[0], **request)
    stop = full[25:31]
    answers = [
        api.complete(PROMPTS[0], **request, stop=["never there", stop], speculation={"k": k})["choices"][0]
        for k in (0, 4)
    ]
    assert all(answer["text"] == full[: full.index(stop)] for answer in answers)
    assert all(answer["finish_reason"] == "stop" for answer in answers)
    pieces = stream(api, PROMPTS[0], **request, stop=stop)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == full[: full.index(stop)]


def test_usage_counts_no_token_after_a_stop_string(api: Api) -> None:
    full = api.complete(PROMPTS[0], max_tokens=60, temperature=0, return_token_ids=True)["choices"][0]
    answer = api.complete(PROMPTS[0], max_tokens=60, temperature=0, stop=full["text"][20:24], return_token_ids=True)
    tokens = answer["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == len(tokens) < 60
    assert tokens == full["token_ids"][: len(tokens)]


def test_metrics_of_a_request_agree_with_its_usage(api: Api) -> None:
    answer = api.complete(PROMPTS[0], max_tokens=30, temperature=0, return_metrics=True)
    speculation = answer["metrics"]["speculative_decoding"]
    assert 1 + speculation["num_spec_steps"] + speculation["num_accepted_draft_tokens"] == 30
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    details = answer["usage"]["completion_tokens_details"]
    assert sum(details.values()) == speculation["num_draft_tokens"]
    assert answer["metrics"]["time_to_first_token_ms"] > 0


LONG = "word " * 600
BAD = [
    ({"model": "gpt-9", "prompt": "x"}, 404, None),
    ({}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ["x", ""]}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": ["x", 5]}, 400, "prompt"),
    ({"prompt": [5, "x"]}, 400, "prompt"),
    ({"prompt": [5, True]}, 400, "prompt"),
    ({"prompt": [5, 512]}, 400, "prompt"),
    ({"prompt": [5, -1]}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "prompt"),
    ({"prompt": LONG}, 400, "prompt"),
    ({"prompt": LONG * 50}, 400, "prompt"),
    ({"prompt": [5] * 512}, 400, "prompt"),
    ({"prompt": ["x"] * 300}, 400, "prompt"),
    ({"prompt": "x", "max_tokens": 511}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "x", "temperature": -0.1}, 400, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "x", "top_p": 0}, 400, "top_p"),
    ({"prompt": "x", "top_p": 1.1}, 400, "top_p"),
    ({"prompt": "x", "top_k": -2}, 400, "top_k"),
    ({"prompt": "x", "n": 0}, 400, "n"),
    ({"prompt": "x", "n": 1000000}, 400, "n"),
    ({"prompt": "x", "seed": 2**64}, 400, "seed"),
    ({"prompt": "x", "stop": ["a"] * 5}, 400, "stop"),
    ({"prompt": "x", "stop": ["a", ""]}, 400, "stop"),
    ({"prompt": "x", "stop": 5}, 400, "stop"),
    ({"prompt": "x", "stream": "yes"}, 400, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "x", "speculation": {"draft": "nobody"}}, 400, "speculation.draft"),
    ({"prompt": "x", "speculation": {"k": -1}}, 400, "speculation.k"),
    ({"prompt": "x", "speculation": {"rule": "psychic"}}, 400, "speculation.rule"),
    ({"prompt": "x", "suffix": "end"}, 400, "suffix"),
]


@pytest.mark.parametrize(("request_body", "status", "param"), BAD, ids=[json.dumps(body)[:50] for body, _, _ in BAD])
@pytest.mark.fault(16, 17)
def test_bad_input_is_refused_by_name(api: Api, request_body: dict[str, Any], status: int, param: str | None) -> None:
    body = json.dumps(request_body).encode()
    response = api.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "temperature": -Infinity}',
    ],
    ids=repr,
)
@pytest.mark.fault(17)
def test_what_is_no_json_object_is_refused(api: Api, body: bytes) -> None:
    response = api.http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": [5] * 3, "max_tokens": 510}, "max_tokens", r"requested 513 tokens \(3 in the prompt, 510 in the "),
        ({"prompt": [5] * 3, "max_completion_tokens": 510}, "max_completion_tokens", "requested 513 tokens"),
        ({"prompt": [5] * 512}, "prompt", r"requested 528 tokens \(512 in the prompt, 16 in the completion\)"),
        ({"prompt": [5] * 600}, "prompt", "your prompt resulted in 600 tokens"),
        ({"prompt": "word " * 600}, "prompt", r"your prompt resulted in \d+ tokens"),
        ({"prompt": "word " * 100_000}, "prompt", "your prompt has 500000 characters"),
    ],
)
def test_a_request_over_the_context_is_refused_in_the_words_clients_expect(
    api: Api, body: dict[str, Any], param: str, says: str
) -> None:
    error = api.post(**body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert re.match(f"This model's maximum context length is 512 tokens. However, .*{says}", error["message"])
    assert "Please reduce the length of the" in error["message"]


def test_bad_input_leaves_nothing_behind(api: Api) -> None:
    assert api.metric("spire_sequences_now") == 0
    assert api.text(PROMPTS[0], max_tokens=4, temperature=0)


@pytest.mark.fault(17)
def test_a_large_body_is_refused_whether_it_is_announced_or_not(api: Api) -> None:
    piece = b"x" * 65536

    def dripped() -> Any:
        for _ in range(40):
            yield piece

    assert api.http.post("/v1/completions", content=piece * 40, headers=JSON).status_code == 413
    assert api.http.post("/v1/completions", content=dripped(), headers=JSON).status_code == 413


@pytest.mark.parametrize("streaming", [False, True])
def test_ignored_fields_are_named_in_a_header_and_ids_are_echoed(api: Api, streaming: bool) -> None:
    body = {"prompt": "x", "max_tokens": 1, "wibble": 1, "frob\u00e9": 2, "user": "me", "stream": streaming}
    response = api.http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-spire-ignored"] == "frob\\xe9, user, wibble"
    assert response.headers["x-request-id"] == "abc-1"
    assert "x-spire-ignored" not in api.post(prompt="x", max_tokens=1).headers
    assert len(api.http.get("/health").headers["x-request-id"]) == 32


def test_null_means_default(api: Api) -> None:
    answer = api.complete("x", max_tokens=None, stop=None, temperature=None, logprobs=None, seed=None, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.fault(13)
def test_a_client_that_leaves_frees_its_sequences_within_a_second(api: Api, streaming: bool) -> None:
    aborted = api.metric("spire_sequences_total", finished_reason="abort")
    body = {"prompt": PROMPTS[0], "max_tokens": 480, "n": 16, "stream": streaming, "ignore_eos": True}
    seconds = [seconds_to_free(api, body) for _ in range(3)]
    assert min(seconds) < 1.0, seconds
    assert api.metric("spire_sequences_total", finished_reason="abort") == aborted + 3 * 16


def seconds_to_free(api: Api, body: dict[str, Any]) -> float:
    """From a client's leaving to the end of what it asked for."""
    url = httpx.URL(api.url)
    content = json.dumps(body).encode()
    with socket.create_connection((url.host, url.port)) as leaver:
        leaver.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        leaver.sendall(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        eventually(lambda: api.metric("spire_sequences_now") == body["n"])
    return eventually(lambda: api.metric("spire_sequences_now") == 0)


def test_requests_join_a_batch_that_is_under_way(api: Api) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(api.complete, PROMPTS[0], max_tokens=480, ignore_eos=True, speculation=OFF)
        eventually(lambda: api.metric("spire_sequences_now", state="running") == 1)
        began = time.monotonic()
        api.complete(PROMPTS[1], max_tokens=4, speculation=OFF)
        assert not first.done(), f"the short request waited {time.monotonic() - began:.1f} s for the long one"
        assert first.result()["usage"]["completion_tokens"] == 480


def test_the_model_says_what_it_can(api: Api) -> None:
    (card,) = api.http.get("/v1/models").json()["data"]
    assert card["max_model_len"] == 512
    assert card["rules"] == ["greedy", "rejection", "block", "invariant"]
    assert card["parameters"] == 260_032
    assert card["chat_template"] is False
    assert card["draft"]["kind"] == "spire"
    assert card["draft"]["bytes_per_sequence"] == api.metric("spire_draft_state_bytes_per_sequence") > 0
    assert card["draft"]["gains"] == [], "k is fixed here"
    assert api.http.get(f"/v1/models/{card['id']}").json()["id"] == card["id"]
    assert api.http.get("/v1/models/other").status_code == 404
    assert api.text("x", model=card["id"], max_tokens=1) is not None
    asked = {"max_tokens": 80, "ignore_eos": True, "speculation": {"k": 64}, "return_rounds": True}
    rounds = api.complete("Once", **asked)["choices"][0]["rounds"]
    assert max(round_["drafted"] for round_ in rounds) == card["draft"]["max_k"]


def test_every_gettable_page_answers_head_alike_without_a_body(api: Api) -> None:
    paths = api.http.get("/openapi.json").json()["paths"]
    got = [path.replace("{name}", "stories260K") for path, operations in paths.items() if "get" in operations]
    assert {"/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/stories260K"} == set(got)
    for path in [*got, "/", "/static/page.js", "/openapi.json", "/docs", "/v1/models/nobody", "/nowhere"]:
        asked, headed = api.http.get(path), api.http.head(path)
        assert (headed.status_code, headed.content) == (asked.status_code, b""), path
        assert headed.headers["content-type"] == asked.headers["content-type"]
        if path != "/metrics":
            assert int(headed.headers["content-length"]) == len(asked.content)
    assert api.http.head("/v1/completions").status_code == api.http.get("/v1/completions").status_code == 405
    assert api.http.head("/health").headers["x-request-id"]


def test_every_state_page_answers(api: Api) -> None:
    assert api.ready()["status"] == "ready"
    assert api.http.get("/health").json() == {"status": "ok"}
    assert api.http.get("/version").json()["version"]
    assert "/v1/completions" in api.http.get("/openapi.json").json()["paths"]
    missing = api.http.get("/nowhere")
    assert (missing.status_code, set(missing.json()["error"])) == (404, {"message", "type", "param", "code"})


def test_both_families_of_metric_names_hold_the_same_counts(api: Api) -> None:
    before = api.metric("spire_generated_tokens_total")
    rounds = api.metric("spire_rounds_total")
    api.complete(PROMPTS[0], max_tokens=20, temperature=0)
    assert api.metric("spire_generated_tokens_total") == before + 20
    assert api.metric("vllm:generation_tokens_total") == before + 20
    assert api.metric("spire_rounds_total") > rounds
    assert api.metric("spire_draft_tokens_total") == api.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert api.metric("vllm:inter_token_latency_seconds_bucket", le="0.002") >= 0
    assert api.metric("spire_draft_state_bytes_per_sequence") > 0


def test_the_parts_of_rounds_fit_into_the_time_they_took(api: Api) -> None:
    """What models took may lie in the round before, where that one's answer was read late: they are bounded apart."""
    eventually(lambda: api.metric("vllm:num_requests_running") == 0)

    def spent() -> dict[str, float]:
        return {part: api.metric("spire_round_seconds_total", part=part) for part in ROUND_PARTS}

    before, began = spent(), time.monotonic()
    api.complete(PROMPTS[0], max_tokens=200, ignore_eos=True, speculation={"k": 4})
    parts = {part: seconds - before[part] for part, seconds in spent().items()}
    elapsed = time.monotonic() - began
    assert parts["verify_forward"] > 0
    for model in ("propose", "verify_forward", "verify_sample"):
        assert 0 <= parts.pop(model) <= elapsed
    assert 0 < sum(parts.values()) <= elapsed
