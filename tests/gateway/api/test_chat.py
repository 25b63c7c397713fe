"""`POST /v1/chat/completions` over the real services around a target with a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Api, eventually
from tests.services import running

MESSAGES = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "Lily and the dog"}]
PROMPT = "system: Tell a story.\nuser: Lily and the dog\nassistant:"


@pytest.fixture(scope="module")
def talker(stories_chat_dir: Path, stories_draft_dir: Path) -> Iterator[Api]:
    with running(stories_chat_dir, stories_draft_dir) as system:
        api = Api(system.url)
        eventually(lambda: api.ready().get("draft") == "connected")
        yield api


def post(api: Api, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return api.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def chat(api: Api, messages: Any = MESSAGES, **request: Any) -> dict[str, Any]:
    response = post(api, messages=messages, **request)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chunks(api: Api, **request: Any) -> list[dict[str, Any]]:
    with api.http.stream(
        "POST", "/v1/chat/completions", json={"messages": MESSAGES, "stream": True} | request
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_is_the_completion_of_the_template_s_prompt(talker: Api) -> None:
    answer = chat(talker, max_tokens=24, temperature=0, return_token_ids=True)
    (choice,) = answer["choices"]
    plain = talker.complete(PROMPT, max_tokens=24, temperature=0, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == plain["prompt_token_ids"]
    assert choice["token_ids"] == plain["token_ids"]
    assert choice["message"] == {"role": "assistant", "content": plain["text"], "refusal": None}
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert answer["usage"]["completion_tokens"] == 24


def test_the_model_says_that_it_has_a_chat_template(talker: Api) -> None:
    (card,) = talker.http.get("/v1/models").json()["data"]
    assert card["chat_template"] is True


def test_text_may_come_in_parts(talker: Api) -> None:
    parts = [{"type": "text", "text": "Lily"}, {"type": "text", "text": "and the dog"}]
    first = chat(talker, [{"role": "user", "content": parts}], max_tokens=8, temperature=0)
    whole = chat(talker, [{"role": "user", "content": "Lily\nand the dog"}], max_tokens=8, temperature=0)
    assert first["choices"] == whole["choices"]


def test_a_stream_says_what_the_whole_answer_says_and_its_role_once(talker: Api) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "n": 2, "seed": 5, "speculation": {"draft": "off"}}
    whole = chat(talker, **asked)
    *pieces, last = chunks(talker, **asked, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["delta"]["content"] for piece in mine) == choice["message"]["content"]
        assert ["role" in piece["delta"] for piece in mine] == [True] + [False] * (len(mine) - 1)
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], whole["usage"]["completion_tokens"])


def test_stop_strings_end_a_chat(talker: Api) -> None:
    full = chat(talker, max_tokens=30, temperature=0)["choices"][0]["message"]["content"]
    (choice,) = chat(talker, max_tokens=30, temperature=0, stop=full[12:16])["choices"]
    assert choice["message"]["content"] == full[: full.index(full[12:16])]
    assert choice["finish_reason"] == "stop"


@pytest.mark.thorough
def test_without_a_limit_an_answer_may_fill_the_context(talker: Api) -> None:
    usage = chat(talker, ignore_eos=True, temperature=0)["usage"]
    assert usage["total_tokens"] == 512
    assert chat(talker, max_tokens=9, max_completion_tokens=4)["usage"]["completion_tokens"] <= 4


def test_logprobs_spell_the_answer(talker: Api) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "seed": 4, "logprobs": True, "top_logprobs": 2}
    (choice,) = chat(talker, **asked)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        likeliest = [other["logprob"] for other in entry["top_logprobs"]]
        assert likeliest == sorted(likeliest, reverse=True)
        assert entry["logprob"] <= likeliest[0] <= 0
    streamed = [entry for piece in chunks(talker, **asked) for entry in piece["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    assert chat(talker, max_tokens=1)["choices"][0]["logprobs"] is None


def test_a_tokenized_chat_is_the_prompt_that_is_completed(talker: Api) -> None:
    asked = chat(talker, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    answer = post(talker, "/tokenize", messages=MESSAGES).json()
    assert answer["tokens"] == asked
    assert answer["tokens"] == post(talker, "/tokenize", prompt=PROMPT).json()["tokens"]
    bare = post(talker, "/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    assert bare == answer["tokens"][: len(bare)] != answer["tokens"]
    assert post(talker, "/tokenize", messages=MESSAGES, add_special_tokens=True).json()["tokens"] == [1, *asked]


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "an integer"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "a list of text parts"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0]", "image_url: only text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].role", "no tools"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
        "not supported",
    ),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"messages": MESSAGES, "functions": [{"name": "dig"}]}, "functions", "not supported"),
    ({"messages": [{"role": "user", "content": "x", "name": "Tom"}]}, "messages", "no names: Tom"),
    ({"messages": [{"role": "user", "content": "x", "name": "\ud800"}]}, "messages", r"no names: \ud800"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "no valid Unicode"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", "context length is 512"),
    ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "messages", "context length is 512"),
    ({"messages": MESSAGES, "max_tokens": 511}, "max_tokens", "in the messages, 511 in the completion"),
    ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"messages": MESSAGES, "logprobs": 3}, "logprobs", "boolean"),
    ({"messages": MESSAGES, "stop": ["a"] * 5}, "stop", "at most 4"),
    ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD, ids=[f"{param}: {says}" for _, param, says in BAD])
def test_bad_input_is_refused_by_name(talker: Api, body: dict[str, Any], param: str, says: str) -> None:
    response = post(talker, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_chats_refuse_prompt_fields_and_name_what_changes_nothing(talker: Api) -> None:
    for name, value in {"echo": True, "best_of": 2}.items():
        assert post(talker, messages=MESSAGES, **{name: value}).json()["error"]["param"] == name
    part = {"type": "text", "text": "x", "cache_control": {}}
    for streaming in (False, True):
        response = post(
            talker, messages=[{"role": "user", "content": [part]}], max_tokens=1, store=True, stream=streaming
        )
        assert response.headers["x-spire-ignored"] == "messages.content.cache_control, store"
    assert post(talker, messages=MESSAGES, model="gpt-9").status_code == 404


def test_a_tokenizer_without_a_template_refuses_chats_and_says_so(api: Api) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        response = post(api, path, messages=MESSAGES)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]


def test_a_prompt_or_messages_are_tokenized_but_not_both(talker: Api) -> None:
    assert post(talker, "/tokenize", messages=MESSAGES, prompt="x").json()["error"]["param"] == "prompt"
    assert post(talker, "/tokenize").json()["error"]["param"] == "prompt"


# -- how messages become a prompt ------------------------------------------------------------------------------------

BEGUN = [*MESSAGES, {"role": "assistant", "content": "Lily saw a"}]
ENDED = "system: Tell a story.\nuser: Lily and the dog\n"
OPTIONS: list[tuple[list[dict[str, str]], dict[str, Any], str]] = [
    (MESSAGES, {"add_generation_prompt": True}, PROMPT),
    (MESSAGES, {"add_generation_prompt": False}, ENDED),
    (BEGUN, {"continue_final_message": True}, f"{ENDED}assistant: Lily saw a"),
    (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}, f"{ENDED}assistant: Lily saw a"),
    (MESSAGES, {"chat_template_kwargs": {"tone": "kind", "unread": [1]}}, f"be kind\n{PROMPT}"),
]


@pytest.mark.parametrize(("messages", "options", "prompt"), OPTIONS, ids=[str(options) for _, options, _ in OPTIONS])
def test_a_chat_is_the_completion_of_the_prompt_that_its_options_make(
    talker: Api, messages: list[dict[str, str]], options: dict[str, Any], prompt: str
) -> None:
    request: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    (choice,) = chat(talker, messages, **request, **options)["choices"]
    (plain,) = talker.complete(prompt, **request)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (plain["prompt_token_ids"], plain["token_ids"])
    assert choice["message"]["content"] == plain["text"]
    tokens = post(talker, "/tokenize", messages=messages, **options).json()["tokens"]
    assert tokens == choice["prompt_token_ids"]


def test_a_chat_gets_another_start_token_if_it_asks_for_one(talker: Api) -> None:
    plain, special = (
        chat(talker, max_tokens=1, return_token_ids=True, add_special_tokens=special)["choices"][0]["prompt_token_ids"]
        for special in (False, True)
    )
    assert special == [1, *plain]


deep: Any = 1
for _ in range(9):
    deep = [deep]
BAD_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude each other"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "must not set messages"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt", "set"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "must not set bos_token"),
    ({"chat_template_kwargs": {"\ud800_token": 1}}, r"chat_template_kwargs.\ud800_token", "must not set"),
    ({"chat_template_kwargs": {"tone": 5}}, "messages", "chat template"),
    ({"chat_template_kwargs": {"tone": "\ud800"}}, "chat_template_kwargs", "Unicode"),
    ({"chat_template_kwargs": {"x": deep}}, "chat_template_kwargs", "8 levels"),
    ({"chat_template_kwargs": {"x": "a" * 20_000}}, "chat_template_kwargs", "16384"),
    ({"chat_template_kwargs": ["tone"]}, "chat_template_kwargs", "dictionary"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt", "boolean"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(("options", "param", "says"), BAD_OPTIONS, ids=[str(bad)[:60] for bad, _, _ in BAD_OPTIONS])
def test_options_that_no_template_can_have_are_refused_by_name(
    talker: Api, options: dict[str, Any], param: str, says: str, path: str
) -> None:
    response = post(talker, path, messages=MESSAGES, **options)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]
