"""The request fields that constrain the output: to JSON, a regular expression, a grammar or a list of choices.

A request may constrain its output by one field at most; checks raise BadParameter. Does not know: whether a grammar is
valid, which the verifier checks by compiling it.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, JsonValue

from gateway.errors import BadParameter
from gateway.requests.bodies import Part, RequestBody, Texts, check_unicode
from spire.rpc.limits import MAX_GRAMMAR_BYTES
from spire.text.kinds import kind_of

_DEEPEST_SCHEMA = 64
_MOST_CHOICES = 4096
_LONGEST_WHITESPACE = 256
# White space between JSON tokens if allowed: enough for a layout, limited because a model might write blanks for ever.
_LAYOUT = r"[ \t\r\n]{1,20}"
_REGEX_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$]")
_OBJECT = {"type": "object"}

_TEXT: dict[str, JsonValue] = {"minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}
_CHOICE: dict[str, JsonValue] = {"minItems": 1, "maxItems": _MOST_CHOICES, "items": {"type": "string", "minLength": 1}}
_WHITESPACE: dict[str, JsonValue] = {"maxLength": _LONGEST_WHITESPACE}
_GRAMMAR_WORDS = "a context-free grammar in Lark's notation, or in llama.cpp's (GBNF)"
_CHOICE_WORDS = "the output is one of these"
_WHITESPACE_WORDS = "only with JSON: a regular expression for what may stand between its tokens"


class JsonSchema(Part):
    """A JSON schema as OpenAI's client sends it: an object with the schema itself and a name."""

    text: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(True, description="a schema is kept whatever this says")


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, description="with type json_schema, and with no other")
    bare_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="a JSON schema without a name, with type json_object or json_schema"
    )


class StructuredOutputs(Part):
    """The constraint on the output: exactly one of json, regex, grammar, choice and json_object."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = Field(default=None, json_schema_extra=_TEXT)
    grammar: str | None = Field(default=None, description=_GRAMMAR_WORDS, json_schema_extra=_TEXT)
    choice: Texts | None = Field(default=None, description=_CHOICE_WORDS, json_schema_extra=_CHOICE)
    json_object: bool | None = Field(default=None, description="any JSON object")
    disable_any_whitespace: bool | None = Field(default=None, description="only with JSON: false lets it be laid out")
    whitespace_pattern: str | None = Field(default=None, description=_WHITESPACE_WORDS, json_schema_extra=_WHITESPACE)


Kind = Literal["json_schema", "regex", "lark"]


class OutputShape(NamedTuple):
    """The constraint on an output's shape, and the name of the request field that contains the constraint.

    `whitespace` is a regular expression for the white space between JSON tokens; empty allows none.
    """

    field: str
    kind: Kind
    text: str
    whitespace: str = ""


class StructuredRequest(RequestBody):
    """Base of requests that can constrain the shape of their output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, json_schema_extra=_TEXT)
    guided_grammar: str | None = Field(None, description=_GRAMMAR_WORDS, json_schema_extra=_TEXT)
    guided_choice: Texts | None = Field(None, description=_CHOICE_WORDS, json_schema_extra=_CHOICE)
    guided_whitespace_pattern: str | None = Field(None, description=_WHITESPACE_WORDS, json_schema_extra=_WHITESPACE)
    json_whitespace: bool | None = Field(
        None, description="only with JSON: true lets it be laid out. By default nothing stands between its tokens"
    )

    @cached_property
    def shape(self) -> OutputShape | None:
        """The one grammar, schema or list of choices that the output must follow, or None. Raises BadParameter."""
        outputs = self.structured_outputs or StructuredOutputs()
        fields: dict[str, tuple[Kind, Any]] = {
            "response_format": ("json_schema", _schema_of(self.response_format)),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_grammar": ("lark", self.guided_grammar),
            "guided_choice": ("regex", self.guided_choice),
            "structured_outputs.json": ("json_schema", outputs.json_schema),
            "structured_outputs.regex": ("regex", outputs.regex),
            "structured_outputs.grammar": ("lark", outputs.grammar),
            "structured_outputs.choice": ("regex", outputs.choice),
            "structured_outputs.json_object": ("json_schema", _OBJECT if outputs.json_object else None),
        }
        given = {name: field for name, field in fields.items() if field[1] is not None}
        if len(given) > 1:
            raise BadParameter(max(given), f"{' and '.join(given)} cannot be combined: leave all but one out")
        if self.structured_outputs and not any(name.startswith("structured_outputs") for name in given):
            kinds = "json, regex, grammar, choice or json_object"
            raise BadParameter("structured_outputs", f"structured_outputs asks for no shape: give it {kinds}")
        whitespace = _whitespace_of(self, outputs, of_json=any(kind == "json_schema" for kind, _ in given.values()))
        for name, (kind, value) in given.items():
            if kind == "json_schema":
                text = _schema_text(name, value)
            else:
                text = _one_of(name, value) if isinstance(value, list) else value
            return OutputShape(name, kind, _checked(name, text), whitespace)
        return None


def _schema_of(asked: ResponseFormat | None) -> dict[str, Any] | None:
    if asked is None:
        return None
    named, bare = asked.json_schema, asked.bare_schema
    if asked.type == "json_schema":
        if (named is None) == (bare is None):
            raise BadParameter("response_format", "type json_schema needs a json_schema, or a schema in its place")
        return named.text if named else bare
    if named is not None:
        raise BadParameter("response_format", f"type {asked.type} takes no json_schema: make it type json_schema")
    if asked.type == "text" and bare is not None:
        raise BadParameter("response_format", "type text takes no schema: make it type json_schema")
    return (bare or _OBJECT) if asked.type == "json_object" else None


def _schema_text(name: str, schema: Any) -> str:
    if isinstance(schema, str):
        _check_size(name, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadParameter(name, f"{name} is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise BadParameter(name, f"{name} is {kind_of(schema)}: a JSON schema is an object")
    if deeper_than(_DEEPEST_SCHEMA, schema):
        raise BadParameter(name, f"{name} is nested deeper than {_DEEPEST_SCHEMA} levels: give it fewer")
    return json_text(name, schema, MAX_GRAMMAR_BYTES)


def json_text(name: str, value: Any, most: int) -> str:
    """Return the JSON of a field's value, encoded piece by piece. Raises BadParameter beyond `most` bytes."""
    pieces, size = list[str](), 0
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        pieces.append(piece)
        if (size := size + len(piece)) > most:
            raise BadParameter(name, f"{name} may have {most} bytes of JSON, it has more")
    return "".join(pieces)


def deeper_than(levels: int, value: Any) -> bool:
    level = [value]
    for _ in range(levels + 1):
        holders = [value for value in level if isinstance(value, dict | list)]
        level = [inner for value in holders for inner in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return False
    return True


def _one_of(name: str, choices: list[str]) -> str:
    """Return a regular expression that matches exactly the texts in `choices`. Raises BadParameter."""
    if not choices:
        raise BadParameter(name, f"{name} is empty: no text could come")
    if len(choices) > _MOST_CHOICES:
        raise BadParameter(name, f"{name} may have {_MOST_CHOICES} choices, {len(choices)} came")
    _check_size(name, *choices)
    for at, choice in enumerate(choices):
        if not choice:
            raise BadParameter(f"{name}[{at}]", f"{name}[{at}] is an empty text: an output has some")
    return "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", choice) for choice in dict.fromkeys(choices))


def _checked(name: str, text: str) -> str:
    if not text:
        raise BadParameter(name, f"{name} is empty: leave it out to allow any text")
    check_unicode(text, name)
    _check_size(name, text)
    return text


def _check_size(name: str, *texts: str) -> None:
    if (size := sum(len(text.encode(errors="surrogatepass")) for text in texts)) > MAX_GRAMMAR_BYTES:
        raise BadParameter(name, f"{name} may have {MAX_GRAMMAR_BYTES} bytes, it has {size}")


def _whitespace_of(request: StructuredRequest, outputs: StructuredOutputs, of_json: bool) -> str:
    """Return the regular expression for the white space between JSON tokens; empty allows none."""
    said: dict[str, Any] = {
        "json_whitespace": request.json_whitespace,
        "structured_outputs.disable_any_whitespace": outputs.disable_any_whitespace,
        "guided_whitespace_pattern": request.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": outputs.whitespace_pattern,
    }
    if not of_json:
        if name := next((name for name, value in said.items() if value), ""):
            raise BadParameter(name, f"{name} is about the white space in JSON, and no JSON is asked for: leave it out")
        return ""
    given = {name: value for name, value in said.items() if value is not None}
    for flag, allows in (("json_whitespace", True), ("structured_outputs.disable_any_whitespace", False)):
        if flag in given:
            given[flag] = _LAYOUT if given[flag] is allows else ""
    if len({bool(pattern) for pattern in given.values()}) > 1:
        raise BadParameter(max(given), f"{' and '.join(given)} contradict each other: leave all but one out")
    # A pattern takes precedence over a flag that allows white space: patterns are last in `said`.
    name, pattern = [("", ""), *given.items()][-1]
    check_unicode(pattern, name)
    if len(pattern) > _LONGEST_WHITESPACE:
        raise BadParameter(name, f"{name} may have {_LONGEST_WHITESPACE} characters, it has {len(pattern)}")
    return pattern
