"""The fields that give an output a shape: each changes what comes, under plain decoding and under speculation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gateway.errors import BadParameter
from gateway.requests.adjustments import adjustments_of
from gateway.requests.bodies import parse
from gateway.requests.schemas import CompletionRequest
from spire.v1 import verifier_pb2 as pb
from tests.gateway.conftest import Api
from tests.marks import thoroughly
from tests.verifier_service.sampling.test_grammar import (
    BYTE_LEVEL_END,
    BYTE_LEVEL_VOCAB,
    ROOT,
    Language,
    language,
    walk,
)

PROMPT = "Once upon a time"
CATS = {
    "type": "object",
    "properties": {"cats": {"type": "array", "items": {"enum": ["Tom", "Lily"]}, "minItems": 2, "maxItems": 2}},
    "required": ["cats"],
    "additionalProperties": False,
}
SPELLED = '{"cats":["Tom","Lily"]}'
ANSWERS = [f'{{"cats":["{first}","{second}"]}}' for first in ("Tom", "Lily") for second in ("Tom", "Lily")]
GBNF = 'root ::= animal " and " animal\nanimal ::= "cat" | "dog"'
PAIRS = [f"{first} and {second}" for first in ("cat", "dog") for second in ("cat", "dog")]
OVERLAPPING = ["the", "the cat", "the cat sat", "th", "a (b|c)*", 'the "end".']

WISHES: list[tuple[dict[str, Any], list[str]]] = [
    ({"structured_outputs": {"json": CATS}}, ANSWERS),
    ({"structured_outputs": {"json": json.dumps(CATS)}}, ANSWERS),
    ({"structured_outputs": {"regex": "[ab]{2}"}}, ["aa", "ab", "ba", "bb"]),
    ({"structured_outputs": {"grammar": GBNF}}, PAIRS),
    ({"structured_outputs": {"grammar": 'start: "cat" " and " "dog"'}}, ["cat and dog"]),
    ({"structured_outputs": {"choice": OVERLAPPING}}, OVERLAPPING),
    ({"guided_choice": OVERLAPPING}, OVERLAPPING),
    ({"guided_choice": ["dog", "dog"]}, ["dog"]),
    ({"guided_grammar": GBNF}, PAIRS),
    ({"response_format": {"type": "json_object", "schema": CATS}}, ANSWERS),
    ({"response_format": {"type": "json_schema", "schema": CATS}}, ANSWERS),
]
AT_LENGTH = [wish for at, wish in enumerate(WISHES) if at % 3]


@pytest.mark.parametrize(
    ("wish", "allowed"),
    [*WISHES[::3], *(thoroughly(*each) for each in AT_LENGTH)],
    ids=[json.dumps(wish)[:60] for wish, _ in WISHES[::3] + AT_LENGTH],
)
def test_an_output_is_one_that_its_shape_allows_and_ends_there(
    api: Api, wish: dict[str, Any], allowed: list[str]
) -> None:
    free = api.text(PROMPT, max_tokens=60, seed=5)
    assert free not in allowed
    for speculation in ({"k": 0}, {"k": 4}):
        answer = api.complete(PROMPT, max_tokens=200, seed=5, n=4, speculation=speculation, **wish)
        assert {choice["text"] for choice in answer["choices"]} <= {*allowed}
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


def test_any_choice_can_come_and_none_is_cut_short_by_its_own_prefix(api: Api) -> None:
    words = ["a", "an", "any"]
    answers = api.complete("x", max_tokens=20, seed=1, n=16, temperature=2, guided_choice=words)["choices"]
    answers += api.complete("x", max_tokens=20, seed=2, n=16, temperature=2, guided_choice=words)["choices"]
    assert {answer["text"] for answer in answers} == {*words}


def test_a_json_object_is_asked_for_by_a_flag_too(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "seed": 8, "temperature": 0.5}
    flagged = api.text("The dog: ", **request, structured_outputs={"json_object": True})
    assert flagged.startswith("{")
    assert flagged == api.text("The dog: ", **request, response_format={"type": "json_object"})


LAID_OUT: list[dict[str, Any]] = [
    {"guided_json": CATS, "json_whitespace": True},
    {"guided_json": CATS, "guided_whitespace_pattern": "[ ]{1,5}"},
    {"structured_outputs": {"json": CATS, "disable_any_whitespace": False}},
    {"structured_outputs": {"json": CATS, "whitespace_pattern": "[ ]{1,5}"}},
]
COMPACT: list[dict[str, Any]] = [
    {"guided_json": CATS},
    {"guided_json": CATS, "json_whitespace": False},
    {"guided_json": CATS, "guided_whitespace_pattern": ""},
    {"structured_outputs": {"json": CATS, "disable_any_whitespace": True}},
]


@pytest.mark.parametrize(
    "wish", [LAID_OUT[0], COMPACT[0], *map(thoroughly, LAID_OUT[1:] + COMPACT[1:])], ids=json.dumps
)
def test_json_is_compact_unless_white_space_is_asked_for(api: Api, wish: dict[str, Any]) -> None:
    answer = api.complete("The cats: ", max_tokens=300, seed=3, n=4, temperature=1.5, **wish)
    texts = [choice["text"] for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert texts
    assert all(json.loads(text).keys() == {"cats"} for text in texts)
    assert all(text in ANSWERS for text in texts) == (wish in COMPACT)


# -- refusals --------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {}}, "structured_outputs", "json, regex, grammar, choice or json_object"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "no shape"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "structured_outputs.json and"),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs.regex", "guided_json"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs.regex",
        "response_format and structured_outputs.regex",
    ),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_regex", "guided_choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structural_tag"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "a list"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice", "list"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "empty"),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]", "string"),
    ({"guided_choice": ["\ud800"]}, "guided_choice", "Unicode"),
    ({"guided_choice": ["a" * 40_000, "b" * 40_000]}, "guided_choice", "65536"),
    ({"guided_choice": ["a"] * 4097}, "guided_choice", "4096"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format", "schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
        "response_format",
        "schema",
    ),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", "dictionary"),
    ({"guided_json": {}, "json_whitespace": False, "guided_whitespace_pattern": " "}, "json_whitespace", "contradict"),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "contradict",
    ),
    ({"guided_json": {}, "guided_whitespace_pattern": " " * 257}, "guided_whitespace_pattern", "256"),
    ({"guided_json": {}, "guided_whitespace_pattern": "\ud800"}, "guided_whitespace_pattern", "Unicode"),
]


OPTIONS: list[tuple[str, object, list[object]]] = [
    ("json_whitespace", True, [False, None]),
    ("guided_whitespace_pattern", "(", ["", None]),
    ("structured_outputs.whitespace_pattern", " ", ["", None]),
    ("structured_outputs.disable_any_whitespace", True, [False, None]),
]
NO_JSON: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "text"}},
    {"guided_regex": "a"},
    {"guided_grammar": GBNF},
    {"guided_choice": ["a"]},
    {"structured_outputs": {"regex": "a"}},
    {"structured_outputs": {"grammar": GBNF}},
    {"structured_outputs": {"choice": ["a"]}},
]


def with_option(wish: dict[str, Any], option: str, value: object) -> CompletionRequest:
    parent, _, name = option.rpartition(".")
    inside = {parent: wish.get(parent, {}) | {name: value}} if parent else {name: value}
    return parse(json.dumps({"prompt": "x"} | wish | inside).encode(), CompletionRequest)


# An object structured_outputs without a shape is refused as such.
WITHOUT_JSON = [
    (wish, *option)
    for wish in NO_JSON
    for option in OPTIONS
    if "structured_outputs" in wish or "structured_outputs" not in option[0]
]


@pytest.mark.parametrize(("wish", "option", "value", "neutral"), WITHOUT_JSON)
def test_white_space_is_asked_for_only_with_json(
    wish: dict[str, Any], option: str, value: object, neutral: list[object]
) -> None:
    with pytest.raises(BadParameter, match="no JSON is asked for") as error:
        _ = with_option(wish, option, value).shape
    assert error.value.param == option
    for nothing in neutral:
        shape = with_option(wish, option, nothing).shape
        assert shape is None or shape.whitespace == ""


@pytest.mark.parametrize(("wish", "param", "says"), BAD, ids=[json.dumps(wish)[:60] for wish, _, _ in BAD])
def test_a_shape_that_is_none_is_refused_by_the_name_of_its_field(
    api: Api, wish: dict[str, Any], param: str, says: str
) -> None:
    body = json.dumps({"prompt": PROMPT} | wish).encode()
    response = api.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]


# -- any choice ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level() -> Language:
    tokenizer_json = (Path(ROOT) / "models/target/tokenizer.json").read_bytes()
    return language(tokenizer_json, BYTE_LEVEL_VOCAB, (BYTE_LEVEL_END,))


def choice_grammar(choices: list[str]) -> pb.Grammar:
    adjustments = adjustments_of(CompletionRequest(prompt="x", guided_choice=choices), [BYTE_LEVEL_END])
    assert adjustments is not None
    return adjustments.grammar


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
HARD = ["/", "//x", '"', "\\", "\n", "\r", "a|b", "(", "[^", "{2}", "<s>", "$", "^a", "#", " ", "\u96ea", "\x00"]


@settings(max_examples=25)
@given(choices=st.lists(TEXTS | st.sampled_from(HARD), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_every_choice_is_allowed_as_it_is_spelled_and_nothing_else(
    byte_level: Language, choices: list[str], seed: int
) -> None:
    grammar = choice_grammar(choices)
    for choice in choices:
        # Letter by letter: of the whole text, what spells a special token would be one.
        spelled = [token for letter in choice for token in byte_level.tokens(letter)]
        byte_level.grammars.compile(grammar).advance([*spelled, BYTE_LEVEL_END])
    output = walk(byte_level.grammars.compile(grammar), byte_level.ends, random.Random(seed))
    assert byte_level.text(output[:-1]) in choices
