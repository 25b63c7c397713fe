"""How much a request may ask for, and which of its fields is to blame for more."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from gateway.api.chat import ChatRequest
from gateway.errors import BadParameter
from gateway.requests.prompts import encode_prompts
from gateway.requests.schemas import MOST_LOGPROBS, CompletionRequest, check_logprobs, parse_completion
from gateway.verifier_client import ServedModel
from tests.gateway.requests.bodies import read

UNSEEN_MODEL = cast("ServedModel", None)


def completion(**body: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "x"} | body).encode())


def chat_completion(prompt: int = 5, context: int = 1 << 17, **body: Any) -> CompletionRequest:
    request = read(ChatRequest, **body)
    assert isinstance(request, ChatRequest)
    return request.as_completion([7] * prompt, context)


@pytest.mark.parametrize("prompt", ["x", ["x"], [5], [[5, 6]]], ids=str)
@pytest.mark.parametrize(("asked", "param"), [({"n": 3}, "n"), ({"n": 1, "best_of": 3}, "best_of")], ids=str)
def test_choices_are_limited_whatever_form_prompts_have(prompt: Any, asked: dict[str, int], param: str) -> None:
    with pytest.raises(BadParameter, match=r"3 choices are asked for.* may have 2") as refusal:
        encode_prompts(completion(prompt=prompt, **asked), UNSEEN_MODEL, 2)
    assert refusal.value.param == param


@pytest.mark.parametrize("prompt", [["x"] * 3, [[5]] * 3], ids=str)
def test_prompts_are_to_blame_where_they_are_many(prompt: Any) -> None:
    with pytest.raises(BadParameter, match="6 choices") as refusal:
        encode_prompts(completion(prompt=prompt, n=2), UNSEEN_MODEL, 5)
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (completion(logprobs=0, max_tokens=MOST_LOGPROBS + 1), "logprobs"),
        (completion(logprobs=2, prompt_logprobs=20, max_tokens=1 << 20), "prompt_logprobs"),
        (completion(prompt_logprobs=0, max_tokens=MOST_LOGPROBS), "prompt_logprobs"),
        (completion(best_of=2, max_tokens=1 << 21), "best_of"),
        (chat_completion(logprobs=True, max_tokens=MOST_LOGPROBS + 1), "logprobs"),
        (chat_completion(logprobs=True, top_logprobs=20, max_tokens=1 << 17), "top_logprobs"),
    ],
)
def test_of_too_many_logprobs_the_field_that_asks_for_most_is_named(request_: CompletionRequest, param: str) -> None:
    with pytest.raises(BadParameter, match=str(MOST_LOGPROBS)) as refusal:
        check_logprobs(request_, [5])
    assert refusal.value.param == param


@pytest.mark.parametrize("scored", [{}, {"prompt_logprobs": 1}], ids=str)
def test_a_chat_without_a_limit_asks_for_no_more_logprobs_than_it_may(scored: dict[str, int]) -> None:
    request = chat_completion(prompt=1000, logprobs=True, top_logprobs=20, n=2, **scored)
    check_logprobs(request, [1000])
    request.max_tokens += 1
    with pytest.raises(BadParameter):
        check_logprobs(request, [1000])
    assert chat_completion(logprobs=True, top_logprobs=20, context=512).max_tokens == 507
    assert chat_completion(top_logprobs=0).max_tokens == (1 << 17) - 5
