"""schemathesis sends what the OpenAPI document allows and what it forbids: every answer is one that it declares."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from gateway.api.openapi import decimals_up_to
from tests.marks import thoroughly

OPERATIONS = {
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
}
# Each of so many requests generates up to 512 tokens for each of up to 16 choices.
# Programs in a language of their own: no JSON schema can say which of them are good.
GRAMMARS = ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "response_format", "structured_outputs")
# Only with JSON, and two of these may contradict each other.
WHITESPACE = {"json_whitespace", "guided_whitespace_pattern"}

load_all_checks()
# Whether what is allowed is accepted is counted below.
CONFORMING = [check for check in CHECKS.get_all() if check.__name__ != "positive_data_acceptance"]


@pytest.fixture(scope="module")
def operations(url: str) -> dict[str, Any]:
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return {operation.label: operation for operation in (found.ok() for found in document.get_all_operations())}


def beyond_json_schema(body: Any, answer: str) -> bool:
    """Whether it takes more than the document to say that a request is valid: a grammar's language, a comparison of
    two fields, which their descriptions tell to people, the length of a prompt in the tokenizer's tokens, or how many
    names in all of a body are unknown."""
    if "context_length_exceeded" in answer or "is not known, like 64 others" in answer:
        return True
    if not isinstance(body, dict):
        return False
    tokens, most = body.get("min_tokens") or 0, body.get("max_completion_tokens") or body.get("max_tokens") or 16
    best_in_a_stream = body.get("best_of") and body.get("stream")
    return any(body.get(name) for name in (*GRAMMARS, *WHITESPACE)) or tokens > most or bool(best_in_a_stream)


def exchanges(operation: Any, mode: GenerationMode, examples: int) -> list[tuple[int, str]]:
    """Status and text of the answers to so many requests; each is checked against what the document declares."""
    seen: list[tuple[int, str]] = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(mode))
    def exchange(case: Case) -> None:
        response = case.call(timeout=120)
        assert response.status_code < 500, response.text
        case.validate_response(response, checks=CONFORMING)
        if mode is GenerationMode.NEGATIVE or not beyond_json_schema(case.body, response.text):
            seen.append((response.status_code, response.text))

    exchange()
    return seen


some_and_many = pytest.mark.parametrize("examples", [5, thoroughly(15)])


def test_the_document_knows_every_route(operations: dict[str, Any]) -> None:
    assert operations.keys() == OPERATIONS


@some_and_many
@pytest.mark.parametrize("label", [thoroughly(label) if "chat" in label else label for label in sorted(OPERATIONS)])
def test_allowed_requests_are_answered_as_declared_and_nearly_always_200(
    operations: dict[str, Any], label: str, examples: int
) -> None:
    seen = exchanges(operations[label], GenerationMode.POSITIVE, examples)
    refused = [text for status, text in seen if status != 200]
    assert seen
    assert len(refused) <= 0.1 * len(seen), refused


@some_and_many
@pytest.mark.parametrize("label", sorted(label for label in OPERATIONS if "POST" in label or "{" in label))
def test_what_the_document_forbids_is_refused_as_it_declares(
    operations: dict[str, Any], label: str, examples: int
) -> None:
    seen = exchanges(operations[label], GenerationMode.NEGATIVE, examples)
    assert seen
    assert all(400 <= status < 500 for status, _ in seen)


def test_the_document_s_limits_are_the_served_model_s(url: str) -> None:
    schemas = httpx.get(f"{url}/openapi.json").json()["components"]["schemas"]
    detokenize, completion = (schemas[name]["properties"] for name in ("DetokenizeRequest", "CompletionRequest"))
    assert detokenize["tokens"]["items"]["maximum"] == 511
    assert detokenize["model"]["anyOf"][0]["enum"] == ["stories260K"]
    assert completion["max_tokens"]["anyOf"][0]["maximum"] == 511
    assert schemas["Speculation"]["properties"]["draft"]["anyOf"][0]["enum"][:2] == ["off", "auto"]


@pytest.mark.parametrize("largest", [10, 15, 99, 100, 511, 32_000, 128_255])
def test_ids_as_text_are_thedecimals_up_to_the_vocabulary_s_end(largest: int) -> None:
    pattern = re.compile(f"^({decimals_up_to(largest)})$")
    around = [*range(1200), *range(max(0, largest - 1200), largest + 1200)]
    assert all(bool(pattern.match(str(number))) == (number <= largest) for number in around)
    assert not any(pattern.match(text) for text in ("", "-1", "01", "1.0", "x"))
