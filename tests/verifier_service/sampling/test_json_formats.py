"""A JSON schema's formats: those that the library knows are kept, all others and annotations change nothing."""

from __future__ import annotations

import json
import random
import re
import uuid
from datetime import date
from typing import Any

import pytest
from hypothesis import given, strategies as st

from spire.errors import InvalidRequest
from tests.paths import ROOT
from tests.verifier_service.sampling.test_grammar import Language, byte_level, walk
from verifier_service.sampling.grammar import ENFORCED, with_enforced_formats

__all__ = ["byte_level"]

ANNOTATIONS: dict[str, Any] = {
    "title": "a name",
    "description": "a word",
    "examples": ["x"],
    "default": "x",
    "deprecated": True,
    "$comment": "for people",
    "readOnly": True,
    "writeOnly": False,
    "contentMediaType": "text/plain",
    "contentEncoding": "base64",
    "$id": "https://example.org/word",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "nullable": True,
    "x-order": 3,
}


def compiles(language: Language, schema: dict[str, Any]) -> bool:
    try:
        language.compile(json_schema=json.dumps(schema))
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    "name", ["uuid4", "color", "int32", "idn-email", "uri-reference", "json-pointer", "regex", "password", ""]
)
@pytest.mark.parametrize("kind", ["string", "integer", ["string", "null"], None])
def test_a_format_that_is_not_kept_is_an_annotation(byte_level: Language, name: str, kind: object) -> None:
    word: dict[str, Any] = {"format": name} | ({} if kind is None else {"type": kind})
    schema = {"type": "object", "properties": {"word": word}, "$defs": {"other": {"items": [word]}}}
    assert compiles(byte_level, schema)


@pytest.mark.parametrize("name", sorted(ANNOTATIONS))
def test_an_annotation_changes_nothing(byte_level: Language, name: str) -> None:
    plain = {"type": "string", "maxLength": 3}
    noted = plain | {name: ANNOTATIONS[name]}
    for seed in range(3):
        texts = [
            walk(byte_level.compile(json_schema=json.dumps(schema)), byte_level.ends, random.Random(seed))
            for schema in (plain, noted)
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(("name", "read"), [("date", date.fromisoformat), ("uuid", uuid.UUID)])
def test_a_known_format_is_kept(byte_level: Language, name: str, read: Any) -> None:
    matcher = byte_level.compile(json_schema=json.dumps({"type": "string", "format": name}))
    output = walk(matcher, byte_level.ends, random.Random(1))
    assert read(json.loads(byte_level.text(output[:-1])))


@pytest.mark.parametrize("name", sorted(ENFORCED))
def test_every_format_that_is_said_to_be_kept_constrains_the_text(byte_level: Language, name: str) -> None:
    kept = byte_level.compile(json_schema=json.dumps({"type": "string", "format": name}))
    kept.advance(byte_level.tokens('"'))
    free = byte_level.compile(json_schema=json.dumps({"type": "string"}))
    free.advance(byte_level.tokens('"'))
    assert kept.masks([])[0].sum() < free.masks([])[0].sum()


def test_the_manual_names_the_formats_that_are_kept() -> None:
    manual = (ROOT / "docs/api.md").read_text()
    (told,) = re.findall(r"schema's formats, ([^;]*) are kept", manual)
    assert set(re.findall("`(.*?)`", told)) == ENFORCED


def test_what_is_not_enforced_and_is_no_annotation_is_still_refused(byte_level: Language) -> None:
    assert not compiles(byte_level, {"type": "array", "uniqueItems": True})
    assert not compiles(byte_level, {"type": "string", "format": 5})


def test_data_that_look_like_a_format_are_left_alone() -> None:
    data = {"format": "color"}
    schema = {
        "enum": [data],
        "const": data,
        "default": data,
        "examples": [data],
        "properties": {"format": {"type": "string"}, "enum": {"format": "color", "type": "string"}},
    }
    assert with_enforced_formats(schema) == schema | {
        "properties": {"format": {"type": "string"}, "enum": {"type": "string"}}
    }


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "items", "enum"]), inner),
    max_leaves=10,
)


@given(values)
def test_a_schema_without_formats_stays_as_it_is(schema: Any) -> None:
    assert with_enforced_formats(schema) == schema
