"""Special tokens in a text: hidden unless they are asked for, whole or streamed, under every depth."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import OFF, Api, stream

PROMPT = "Once upon a time"
START, END = 1, 2
# Some tokens of text among start tokens, which would end it.
MIXED: dict[str, Any] = {
    "max_tokens": 24,
    "seed": 3,
    "allowed_token_ids": [START, 300, 301, 302],
    "logit_bias": {"1": 4},
    "temperature": 2,
    "return_token_ids": True,
    "ignore_eos": True,
}


@pytest.mark.parametrize("speculation", [OFF, {"k": 4}], ids=str)
def test_special_tokens_are_shown_if_they_are_not_skipped(api: Api, speculation: dict[str, Any]) -> None:
    (hidden,) = api.complete(PROMPT, **MIXED, speculation=speculation)["choices"]
    (shown,) = api.complete(PROMPT, **MIXED, speculation=speculation, skip_special_tokens=False)["choices"]
    assert shown["token_ids"] == hidden["token_ids"]
    assert 0 < shown["token_ids"].count(START) < 24
    assert shown["text"].count("<s>") == shown["token_ids"].count(START)
    assert shown["text"].replace("<s>", "") == hidden["text"]
    pieces = stream(api, PROMPT, **MIXED, speculation=speculation, skip_special_tokens=False)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == shown["text"]


def test_offsets_point_at_special_tokens(api: Api) -> None:
    (choice,) = api.complete(PROMPT, **MIXED, logprobs=1, skip_special_tokens=False)["choices"]
    logprobs = choice["logprobs"]
    for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"].startswith(token, at)
    assert "".join(logprobs["tokens"]) == choice["text"]


def test_a_stop_string_may_be_a_special_token_s_text(api: Api) -> None:
    (shown,) = api.complete(PROMPT, **MIXED, skip_special_tokens=False)["choices"]
    (stopped,) = api.complete(PROMPT, **MIXED, skip_special_tokens=False, stop="<s>")["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == (shown["text"].partition("<s>")[0], "stop")
    (hidden,) = api.complete(PROMPT, **MIXED, stop="<s>")["choices"]
    assert hidden["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("wish", "text", "reason"),
    [
        ({"skip_special_tokens": False}, "", "stop"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "</s>", "stop"),
        ({"include_stop_str_in_output": True}, "", "stop"),
        ({"skip_special_tokens": False, "ignore_eos": True}, "</s></s></s>", "length"),
        ({"ignore_eos": True}, "", "length"),
    ],
    ids=str,
)
def test_the_token_that_ends_a_text_is_shown_with_what_ended_it(
    api: Api, wish: dict[str, Any], text: str, reason: str
) -> None:
    (choice,) = api.complete(PROMPT, max_tokens=3, allowed_token_ids=[END], **wish)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_an_echo_of_token_ids_shows_them_too(api: Api) -> None:
    for skipped, echoed in ((True, ""), (False, "<s><s>")):
        request = {"max_tokens": 0, "echo": True, "logprobs": 0, "skip_special_tokens": skipped}
        (choice,) = api.complete([START, START], **request)["choices"]
        assert choice["text"] == echoed
        assert choice["logprobs"]["text_offset"] == [0, len(echoed) // 2]
