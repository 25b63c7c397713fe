"""Output is what a schema, a regular expression or a grammar allows, drafted or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Api

PROMPT = "Once upon a time"
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    "wish",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON)},
    ],
    ids=["response_format", "guided_json", "guided_json as text"],
)
def test_a_json_schema_is_kept_and_its_end_ends_the_text(api: Api, wish: dict[str, Any], k: int) -> None:
    answer = api.complete("The dog: ", max_tokens=200, seed=3, ignore_eos=True, **wish, speculation={"k": k})
    person = json.loads(answer["choices"][0]["text"])
    assert person["kind"] in ("cat", "dog")
    assert 1 <= person["age"] <= 99
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_json_object_a_regex_and_a_grammar_are_kept(api: Api) -> None:
    anything = api.text("The dog: ", max_tokens=60, seed=8, response_format={"type": "json_object"}, temperature=0.5)
    assert anything.lstrip().startswith("{")
    digits = api.text("Call ", max_tokens=60, seed=1, guided_regex=r"[0-9]{3}-[0-9]{4}")
    assert len(digits) == 8
    assert digits.replace("-", "").isdigit()
    lark = 'start: "yes" | "no" | "may" "be"'
    assert api.text("Is it? ", max_tokens=60, seed=1, guided_grammar=lark) in ("yes", "no", "maybe")
    free = api.text(PROMPT, max_tokens=20, temperature=0)
    assert api.text(PROMPT, max_tokens=20, temperature=0, response_format={"type": "text"}) == free


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("wish", [{"guided_regex": "("}, {"guided_grammar": "start: nothing"}])
def test_what_is_no_grammar_is_refused_before_a_stream_begins(api: Api, wish: dict[str, str], streaming: bool) -> None:
    response = api.post(prompt=PROMPT, stream=streaming, **wish)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(wish))
    assert "grammar cannot be followed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
    ],
)
def test_a_verifier_refusal_names_the_field_as_the_request_does(api: Api, wish: dict[str, Any], param: str) -> None:
    error = api.post(prompt=PROMPT, **wish).json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_formats_that_are_not_kept_and_annotations_are_accepted(api: Api) -> None:
    color = {"type": "string", "format": "color", "maxLength": 4, "title": "a colour", "examples": ["red"]}
    schema = {"type": "object", "properties": {"c": color}, "required": ["c"], "additionalProperties": False}
    text = api.text("The dog: ", max_tokens=60, seed=3, guided_json=schema)
    assert len(json.loads(text)["c"]) <= 4
