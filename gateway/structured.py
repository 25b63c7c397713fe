"""The fields of a request that say what shape its output has: a JSON schema, a regular expression, a grammar.

At most one of them may be given. Whether a grammar is one, the verifier finds out when it compiles it.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from gateway.bodies import RequestBody
from gateway.errors import BadParameter
from gateway.prompts import check_unicode, kind_of
from spire.rpc.limits import MAX_GRAMMAR_BYTES

_DEEPEST_SCHEMA = 64
_GRAMMAR_SCHEMA: dict[str, JsonValue] = {"minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}


class JsonSchema(BaseModel):
    """A JSON schema as the official client sends it: the schema itself beside a name for it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, description="with type json_schema, and with no other")


class StructuredRequest(RequestBody):
    """A request whose output can be asked to have a shape."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, json_schema_extra=_GRAMMAR_SCHEMA)
    guided_grammar: str | None = Field(
        None, description="a context-free grammar in Lark's notation", json_schema_extra=_GRAMMAR_SCHEMA
    )

    @cached_property
    def grammars(self) -> dict[str, str]:
        """Grammars by the field that asks for one, as text. Of a request that `check_grammars` takes, at most one."""
        shape = self.response_format
        fields = {
            "response_format": None if shape is None else _schema_of(shape),
            "guided_json": _as_text(self.guided_json) if isinstance(self.guided_json, dict) else self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_grammar": self.guided_grammar,
        }
        return {name: text for name, text in fields.items() if text is not None}


def _schema_of(shape: ResponseFormat) -> str | None:
    if shape.type == "json_schema" and shape.json_schema is not None:
        return _as_text(shape.json_schema.text)
    return _as_text({"type": "object"}) if shape.type == "json_object" else None


def _as_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


def check_grammars(request: StructuredRequest) -> None:
    """Raises BadParameter for more than one grammar, and for what is none at first sight."""
    shape = request.response_format
    if shape is not None and (shape.type == "json_schema") != (shape.json_schema is not None):
        raise BadParameter("response_format", "type json_schema needs a json_schema, no other type has one")
    _check_json_schema("response_format", shape.json_schema.text if shape and shape.json_schema else {})
    _check_json_schema("guided_json", _read_json(request.guided_json))
    grammars = request.grammars
    if len(grammars) > 1:
        raise BadParameter(max(grammars), f"{' and '.join(grammars)} cannot be combined: leave all but one out")
    for name, text in grammars.items():
        if not text:
            raise BadParameter(name, f"{name} is empty: leave it out to allow any text")
        check_unicode(text, name)
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            raise BadParameter(name, f"{name} may have {MAX_GRAMMAR_BYTES} bytes, it has {size}")


def _read_json(schema: dict[str, Any] | str | None) -> Any:
    if not isinstance(schema, str):
        return schema or {}
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise BadParameter("guided_json", f"guided_json is not valid JSON: {error}") from error


def _check_json_schema(name: str, schema: Any) -> None:
    if not isinstance(schema, dict):
        raise BadParameter(name, f"{name} is {kind_of(schema)}: a JSON schema is an object")
    if _deeper_than(_DEEPEST_SCHEMA, schema):
        raise BadParameter(name, f"{name} is nested deeper than {_DEEPEST_SCHEMA} levels: give it fewer")


def _deeper_than(levels: int, value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper_than(levels - 1, item) for item in inner)
