"""Every field that other servers of these routes take is honoured, refused by name, or ignored and named."""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import completion_create_params as openai_chats
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming, CompletionCreateParamsStreaming
from typing_extensions import get_type_hints, is_typeddict

from gateway.api.chat import ChatRequest
from gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from gateway.errors import BadParameter
from gateway.requests.adjustments import field_of
from gateway.requests.bodies import RequestBody, ignored_header
from gateway.requests.fields import GENERATION, TOKENIZATION, ignored_fields
from gateway.requests.schemas import CompletionRequest
from spire.text.chat_messages import IGNORED, UNSUPPORTED, plain_message
from tests.gateway.requests.bodies import ROUTES, TABLE, every_route, read, refusal
from tests.paths import ROOT

SCHEMAS: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "schemas.toml").read_text())


def at(path: str, value: object) -> dict[str, Any]:
    """A body that holds nothing but this, at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def fate(route: type[RequestBody], path: str) -> str:
    """What becomes of a field with a value that nobody knows."""
    try:
        ignored = ignored_fields(at(path, object()), route, route.lists)
    except BadParameter as error:
        return "refused" if error.code == "unsupported_parameter" else "unknown"
    return "honoured" if not ignored else "ignored" if set(ignored) <= route.lists.ignored else "unknown"


# -- the schemas of others ---------------------------------------------------------------------------------------------


def paths(params: object, prefix: str = "") -> Iterator[str]:
    """The dotted paths of a TypedDict's fields, at every depth. Of a message's content, the parts that are text."""
    if is_typeddict(params):
        hints = get_type_hints(params)
        if prefix == "messages.content." and typing.get_args(hints["type"]) != ("text",):
            return
        for name, hint in hints.items():
            yield f"{prefix}{name}"
            yield from paths(hint, f"{prefix}{name}.")
    elif typing.get_origin(params) is not dict:
        for inner in typing.get_args(params):
            yield from paths(inner, prefix)


def openai_fields() -> list[tuple[type[RequestBody], str]]:
    params = [
        (CompletionRequest, CompletionCreateParamsNonStreaming),
        (CompletionRequest, CompletionCreateParamsStreaming),
        (ChatRequest, openai_chats.CompletionCreateParamsNonStreaming),
        (ChatRequest, openai_chats.CompletionCreateParamsStreaming),
    ]
    return sorted({(route, path) for route, schema in params for path in paths(schema)}, key=str)


@pytest.mark.parametrize(("route", "path"), openai_fields())
def test_every_field_of_the_openai_package_is_known(route: type[RequestBody], path: str) -> None:
    assert fate(route, path) != "unknown"


def test_the_fields_of_the_openai_package_are_read_at_every_depth() -> None:
    """A control for the test above."""
    found = {path for _, path in openai_fields()}
    deep = {"response_format.json_schema.strict", "stream_options.include_obfuscation", "messages.content.text"}
    assert deep | {"messages.tool_calls", "web_search_options.user_location"} < found
    assert fate(ChatRequest, "stream_options.wibble") == fate(ChatRequest, "wibble") == "unknown"


@pytest.mark.parametrize("package", ["openai", "transformers"])
def test_the_installed_package_is_the_one_whose_version_is_told(package: str) -> None:
    assert SCHEMAS[package]["version"] == version(package)


@every_route
@pytest.mark.parametrize(
    ("server", "path"), [(server, path) for server, schema in SCHEMAS.items() for path in schema.get("names", [])]
)
def test_every_field_of_other_servers_is_known(route: type[RequestBody], server: str, path: str) -> None:
    assert fate(route, path) != "unknown"


@every_route
def test_what_one_route_honours_the_other_knows(route: type[RequestBody]) -> None:
    ours = {name for other in ROUTES for name in other.model_fields}
    assert {name for name in ours if fate(route, name) == "unknown"} == set()


def test_no_field_is_listed_twice_or_never_refused_and_advice_is_honoured() -> None:
    assert [path for path in TABLE["refused"] if all(fate(route, path) == "honoured" for route in ROUTES)] == []
    for lists in (GENERATION, TOKENIZATION):
        assert not lists.ignored & lists.refused.keys()
    advice = {refusal.instead for refusal in GENERATION.refused.values()} - {""}
    assert len(advice) > 10
    assert all(fate(CompletionRequest, instead) == "honoured" for instead in advice)


def test_message_fields_no_template_gets_are_the_ones_refused_and_ignored() -> None:
    def of_messages(paths: Iterable[str]) -> set[str]:
        return {name for parent, _, name in (path.rpartition(".") for path in paths) if parent == "messages"}

    refused = {name: GENERATION.refused[f"messages.{name}"].neutral for name in of_messages(GENERATION.refused)}
    assert refused == UNSUPPORTED
    assert of_messages(GENERATION.ignored) == IGNORED


def test_the_manual_lists_what_is_refused_and_what_is_ignored() -> None:
    paragraphs = (ROOT / "docs/api.md").read_text().split("\n\n")

    def names(beginning: str) -> set[str]:
        (paragraph,) = [text for text in paragraphs if text.startswith(beginning)]
        return set(re.findall(r"`([a-z_.]+)`", paragraph))

    refused = {path for route in ROUTES for path in TABLE["refused"] if fate(route, path) == "refused"}
    assert refused <= names("**Refused**") <= TABLE["refused"].keys() | {"param"}
    assert names("**Ignored**") == set(TABLE["ignored"]["names"])
    assert names("`/tokenize`") == TABLE["tokenization"]["refused"].keys()


# -- each field --------------------------------------------------------------------------------------------------------


def body_with(path: str, value: Any) -> dict[str, Any]:
    """What is added to the least body of a route, so that it is right but for this field."""
    parent, _, name = path.rpartition(".")
    match parent:
        case "":
            return {name: value}
        case "messages":
            return {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x", name: value}]}
        case "messages.content":
            return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", name: value}]}]}
        case "stream_options":
            return {"stream": True, "stream_options": {name: value}}
        case "response_format.json_schema":
            schema = {"schema": {}, name: value}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "response_format":
            return {"response_format": {"type": "json_object", name: value}}
        case _:
            return at(path, value)


def listed(paths: typing.Iterable[str]) -> list[tuple[type[RequestBody], str]]:
    """These fields on the routes that do not honour them. Completions have no messages."""
    return [
        (route, path)
        for route in ROUTES
        for path in paths
        if fate(route, path) in ("refused", "ignored") and (route is ChatRequest or not path.startswith("messages."))
    ]


@pytest.mark.parametrize(("route", "path"), listed(TABLE["refused"]))
def test_what_would_change_the_answer_is_refused_by_name(route: type[RequestBody], path: str) -> None:
    error = refusal(route, **body_with(path, "something"))
    place = path.replace("messages.", "messages[1].")
    while place and place != error.param:  # where what holds the field is refused, that is named
        place = place.rpartition(".")[0]
    assert place
    assert error.code == "unsupported_parameter"
    assert str(error).startswith(f"{error.param} is not supported")


@pytest.mark.parametrize(("route", "path"), listed(TABLE["refused"]))
def test_values_that_ask_for_nothing_are_accepted_without_a_word(route: type[RequestBody], path: str) -> None:
    for value in [*GENERATION.refused[path].neutral, None]:
        if "." not in path or fate(route, path.rpartition(".")[0]) == "honoured":
            assert ignored_header(read(route, **body_with(path, value))) == {}


@pytest.mark.parametrize(("route", "path"), listed(TABLE["ignored"]["names"]))
@pytest.mark.parametrize("value", ["something", 5, {"a": 1}, [False]])
def test_what_cannot_change_the_answer_is_ignored_and_named(route: type[RequestBody], path: str, value: Any) -> None:
    if "." in path and fate(route, path.rpartition(".")[0]) != "honoured":
        pytest.skip("what holds it is refused")
    assert ignored_header(read(route, **body_with(path, value))) == {"X-Spire-Ignored": path}
    assert ignored_header(read(route, **body_with(path, None))) == {}


@every_route
@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("top_a", 0, 0.2),
        ("tfs", 1, 0.95),
        ("tfs_z", 1.0, 0.95),
        ("smoothing_factor", 0.0, 0.3),
        ("dynatemp_low", 1.0, 0.5),
        ("top_n_sigma", 0, 1.5),
        ("nsigma", 0, 1.5),
        ("negative_prompt", "", "bad"),
        ("custom_token_bans", [], [5]),
        ("custom_token_bans", "", "5"),
        ("reasoning_effort", "none", "low"),
    ],
)
def test_other_sampling_and_thinking_fields_are_refused_unless_off(
    route: type[RequestBody], name: str, neutral: object, value: object
) -> None:
    error = refusal(route, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    for nothing in (neutral, None):
        assert ignored_header(read(route, **{name: nothing})) == {}


def test_true_is_no_number_that_asks_for_nothing() -> None:
    for body in ({"best_of": True}, {"echo": 0}, {"mirostat": False}, {"typical_p": True}):
        assert refusal(ChatRequest, **body).param == next(iter(body))


@pytest.mark.parametrize("route", [TokenizeRequest, DetokenizeRequest])
def test_what_changes_no_tokens_is_ignored_where_texts_are_tokenized(route: type[RequestBody]) -> None:
    ignored = {"temperature": 2, "max_tokens": 1, "typical_p": 0.5, "wibble": 1}
    assert ignored_header(read(route, **ignored)) == {"X-Spire-Ignored": ", ".join(sorted(ignored))}


@pytest.mark.parametrize(
    ("route", "name", "instead"),
    [
        (TokenizeRequest, "tools", "leave it out, or send []"),
        (TokenizeRequest, "content", "use prompt"),
        (TokenizeRequest, "add_special", "use add_special_tokens"),
        (DetokenizeRequest, "skip_special_tokens", "leave it out, or send false"),
        (DetokenizeRequest, "prompt", "leave it out"),
    ],
)
def test_what_changes_tokens_is_refused_where_texts_are_tokenized(
    route: type[RequestBody], name: str, instead: str
) -> None:
    error = refusal(route, **{name: True})
    assert error.param == name
    assert instead in str(error)


# -- depth, and what is absent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": None}},
        {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}},
        {"speculation": {"k": None, "draft": None, "rule": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": None, "strict": None, "schema": {}}}},
        {"messages": [{"role": "user", "content": "x", "audio": None, "function_call": None, "name": None}]},
    ],
)
def test_null_is_absent_at_every_depth(body: dict[str, Any]) -> None:
    assert ignored_header(read(ChatRequest, **body)) == {}


def test_null_is_absent_among_biases() -> None:
    request: Any = read(CompletionRequest, logit_bias={"5": None, "6": 1})
    assert request.biases == {6: 1}


def test_what_nobody_else_has_is_refused_inside_speculation() -> None:
    error = refusal(CompletionRequest, speculation={"wibble": 1})
    assert error.param == "speculation.wibble"
    assert str(error) == "speculation.wibble is not known: speculation has draft, k, rule, stop"


def test_ignored_fields_are_named_once_by_their_paths() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    request = read(ChatRequest, messages=[{"role": "user", "content": [part, part]}] * 2, stream_options={"wibble": 1})
    assert ignored_header(request) == {"X-Spire-Ignored": "messages.content.cache_control, stream_options.wibble"}


@every_route
def test_the_newer_name_of_the_limit_counts_before_the_older(route: type[RequestBody]) -> None:
    both: Any = read(route, max_completion_tokens=3, max_tokens=9)
    request = both if route is CompletionRequest else both.as_completion([5], 512)
    assert (request.max_tokens, request.limit_name) == (3, "max_completion_tokens")
    older: Any = read(route, max_tokens=9)
    request = older if route is CompletionRequest else older.as_completion([5], 512)
    assert (request.max_tokens, request.limit_name) == (9, "max_tokens")


NAMES = {
    "tokens": "prompt",
    "allowed_tokens": "allowed_token_ids",
    "end_tokens": "stop_token_ids",
    "rule": "speculation.rule",
    "grammar": "guided_regex",
    "sequence_id": "",
    "": "",
} | {name: name for name in ("logit_bias", "temperature", "top_p", "min_p", "logprobs", "repetition_penalty")}


@pytest.mark.parametrize("param", NAMES)
def test_what_the_verifier_names_is_told_by_the_request_s_own_name(param: str) -> None:
    request: Any = read(CompletionRequest, guided_regex="(")
    assert field_of(request, param) == NAMES[param]
    chat: Any = read(ChatRequest, guided_regex="(")
    assert field_of(chat.as_completion([5], 512), param) == ("messages" if param == "tokens" else NAMES[param])


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": [5, "a"]}, "stop_token_ids[1]"),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [5]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]}, "messages[0].content[0].txt"),
    ({"logit_bias": {"5": "a"}}, "logit_bias.5"),
    ({"stop": 5}, "stop"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
]


@pytest.mark.parametrize(("body", "place"), PLACES, ids=[place for _, place in PLACES])
def test_whoever_finds_a_field_wrong_spells_its_place_alike(body: dict[str, Any], place: str) -> None:
    error = refusal(ChatRequest, **body)
    assert error.param == place
    assert str(error).startswith(place)
    assert "str:" not in str(error)
    assert "any]" not in str(error)


def test_the_lists_are_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "fields.toml" in project["tool"]["setuptools"]["package-data"]["gateway.requests"]


def test_what_a_message_asks_nothing_with_does_not_reach_the_template() -> None:
    nothing = {"tool_calls": [], "function_call": None, "audio": None, "annotations": []}
    plain = {"role": "assistant", "content": "x", "name": "Tom"}
    request: Any = read(ChatRequest, messages=[plain | nothing])
    assert plain_message(request.messages[0].given, "messages[0]") == plain
