"""The official client, unmodified: what it sends is understood, what it gets it understands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services import start

MODEL = "stories260K"
PROMPT = "Once upon a time"
CHAT: Any = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "Lily and the dog"}]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(client: openai.OpenAI, **request: Any) -> str:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24} | request
    text: str = client.completions.create(**options).choices[0].text
    return text


def test_the_model_is_found_by_listing(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).created == model.created


def test_a_completion_says_all_that_the_client_knows_of_one(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None
    assert answer.system_fingerprint
    assert len(answer._request_id or "") == 32


def test_a_stream_is_the_whole_answer_in_pieces_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0)
    *chunks, last = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 30)


def test_a_seed_gives_the_same_text_with_speculation_and_without(client: openai.OpenAI) -> None:
    once, again = text_of(client, seed=7), text_of(client, seed=7)
    plain = text_of(client, seed=7, extra_body={"speculation": {"draft": "off"}})
    assert once == again == plain
    assert text_of(client, seed=8) != once


def test_logprobs_are_four_parallel_arrays_that_spell_the_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=3, seed=5).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs is not None
    assert all(number is not None and number <= 0 for number in logprobs.token_logprobs)
    assert logprobs.top_logprobs is not None
    assert [len(top) >= 3 for top in logprobs.top_logprobs] == [True] * 8
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:at])) for at in range(8)]


def test_an_echo_puts_the_prompt_in_front_with_its_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert None not in logprobs.token_logprobs[1:]
    assert len(logprobs.token_logprobs) == answer.usage.prompt_tokens


def test_stop_and_n_are_understood(client: openai.OpenAI) -> None:
    full = text_of(client, temperature=0)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, n=2, stop=["never", full[10:14]]
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.text for choice in answer.choices} == {full[: full.index(full[10:14])]}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.thorough
def test_penalties_and_biases_are_understood(client: openai.OpenAI) -> None:
    token = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    (first,) = token.token_ids  # type: ignore[attr-defined]
    banned = text_of(client, max_tokens=1, temperature=0, logit_bias={str(first): -100})
    assert banned != token.text
    greedy: dict[str, Any] = {"max_tokens": 90, "temperature": 0}
    assert text_of(client, **greedy, presence_penalty=2, frequency_penalty=2) != text_of(client, **greedy)


# -- chats -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_a_chat_s_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 20, "n": 2, "seed": 3}
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for choice in whole.choices:
        deltas = [c.choices[0].delta for c in chunks if c.choices[0].index == choice.index]
        assert "".join(delta.content or "" for delta in deltas) == choice.message.content
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert last.usage == whole.usage or last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_s_logprobs_have_the_chat_s_shape(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=6, logprobs=True, top_logprobs=2, seed=4
    ).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == choice.message.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == choice.message.content


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_body", "error", "code", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", None),
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_value", "max_tokens"),
        ({"max_tokens": 511}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"suffix": "the end"}, openai.BadRequestError, "unsupported_parameter", "suffix"),
    ],
)
def test_a_refusal_is_the_exception_the_client_has_for_it(
    client: openai.OpenAI, request_body: dict[str, Any], error: type[openai.APIStatusError], code: str, param: str
) -> None:
    with pytest.raises(error) as refused:
        text_of(client, **request_body)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.request_id


def test_tools_are_refused_as_a_bad_request(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "dig", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model=MODEL, messages=CHAT, tools=[tool])


def test_a_body_over_the_limit_is_a_status_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        text_of(client, prompt="x" * 3_000_000)
    assert refused.value.status_code == 413


def test_no_verifier_is_a_server_error(tmp_path: Path) -> None:
    options = ["--verifier", "127.0.0.1:9", "--startup-patience", "0", "--port", "0"]
    gateway = start(["-m", "gateway", *options], tmp_path)
    try:
        with openai.OpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as refused:
                text_of(client)
            assert refused.value.status_code == 503
    finally:
        gateway.stop()
