"""Parses request bodies by schema, for all routes, and declares the error responses for OpenAPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, FailFast, Field, GetJsonSchemaHandler, PrivateAttr, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ValidationError

from gateway.aside import by_size
from gateway.errors import BadParameter, UnknownModel
from gateway.requests.fields import GENERATION, Lists, ignored_fields, shown
from gateway.rounds.engine import Engine
from gateway.text.json_reader import read_json
from gateway.verifier_client import ServedModel

_NULL = {"type": "null"}
# The most ignored fields that the header names.
_MOST_NAMED = 16
# Errors cut a wrong model name to _LONGEST_NAME characters and leave out a wrong value above _LONGEST_VALUE.
_LONGEST_NAME, _LONGEST_VALUE = 64, 40
_REFUSALS = {
    400: "The request is wrong",
    403: "A page of another site asks",
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not declared to be JSON",
    429: "The queue is full, or a quota is used up",
    431: "The head has too many headers, or too long a query",
    500: "Internal error",
    503: "No verifier",
    504: "The request took longer than it may",
}
# Fields whose values errors never show: a log of errors must not hold the texts of requests.
_TEXTS = (("prompt",), ("messages",), ("stop",))
_UNION_MEMBERS = {"str", "list[str]", "dict[str,any]"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


# The OpenAPI document adds the served model's limits to fields of these formats: see `gateway/api/openapi.py`.
ModelName = Annotated[str, Field(json_schema_extra={"format": "model-id"})]
TokenCount = Annotated[int, Field(json_schema_extra={"format": "token-count"})]
TokenId = Annotated[int, Field(json_schema_extra={"format": "token-id", "minimum": 0})]


class _FirstError(FailFast):
    # The members of a union must be hashable.
    __hash__ = object.__hash__


# Report only the first wrong item of a list: finding all in a long list would block the gateway for seconds.
FIRST_ERROR = _FirstError()

TokenIds = Annotated[list[TokenId], FIRST_ERROR]
Texts = Annotated[list[str], FIRST_ERROR]


class Part(BaseModel):
    """Base of objects in a request body: `null` means a field's default. `requests/fields.py` checks unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, raw: Any) -> Any:
        return {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else raw

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema)
        for name in fields["properties"].keys() - {*fields.get("required", [])}:
            fields["properties"][name] = _nullable(fields["properties"][name])
        return schema


def _nullable(field: JsonSchemaValue) -> JsonSchemaValue:
    inside = set() if "anyOf" in field else field.keys() - {"title", "description", "default"}
    about = {name: value for name, value in field.items() if name not in {*inside, "anyOf"}}
    kinds = field.get("anyOf") or [{name: field[name] for name in sorted(inside)}]
    return about | {"anyOf": [*(kind for kind in kinds if kind != _NULL), _NULL]}


class RequestBody(Part):
    """Base of the schemas of request bodies."""

    lists: ClassVar[Lists] = GENERATION

    model: ModelName | None = None
    # The dotted paths of the ignored fields.
    _ignored: list[str] = PrivateAttr(default_factory=list)


Body = TypeVar("Body", bound=RequestBody)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI declaration of a route's error responses, by HTTP status."""
    return {status: {"model": ErrorResponse, "description": _REFUSALS[status]} for status in statuses}


def parse(body: bytes, schema: type[Body]) -> Body:
    """Parse a JSON request body by its schema and record the fields to ignore. Raises BadParameter."""
    raw = read_json(body)
    if not isinstance(raw, dict):
        raise BadParameter("body", "the body must be a JSON object", "invalid_json")
    ignored = ignored_fields(raw, schema, schema.lists)
    try:
        request = schema.model_validate(raw)
    except ValidationError as error:
        raise bad_parameter(error.errors(include_url=False)) from error
    request._ignored = ignored
    return request


async def parsed(http: Request, parser: Callable[[bytes], Body]) -> tuple[Body, int]:
    """Return the request's body, parsed by `parser`, and its size in bytes. No object keeps its bytes in memory."""
    body: bytes = http.scope["state"].pop("body")
    return await by_size(len(body), parser, body), len(body)


async def read_body(http: Request, schema: type[Body], engine: Engine) -> tuple[Body, ServedModel, int]:
    """Return the parsed body, the served model, and the body's size in bytes.

    Raises BadParameter, NoVerifier, ShuttingDown or UnknownModel.
    """
    request, size = await parsed(http, lambda body: parse(body, schema))
    model = engine.model
    check_model(request.model, model)
    return request, model, size


def bad_parameter(problems: Any) -> BadParameter:
    """Convert the validation errors of pydantic to one BadParameter, which names the first wrong field."""
    return BadParameter(_place(problems[0]["loc"]) or "body", "; ".join(map(_told, problems[:8])))


def _place(loc: tuple[str | int, ...]) -> str:
    """Return the path of a field as error messages spell it, such as `messages[0].role`.

    Pydantic reports an error in a union once for each member type and appends that type's name, which is omitted here.
    """
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part not in _UNION_MEMBERS]
    return "".join(parts).removeprefix(".")


def _told(problem: Any) -> str:
    """Return the message for a wrong field, with the field's value if that is short and not a text of the request."""
    value, told = problem.get("input"), problem["loc"][:1] not in _TEXTS
    short = isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _LONGEST_VALUE)
    came = f", {value!r} came" if told and short and len(repr(value)) <= _LONGEST_VALUE else ""
    return f"{_place(problem['loc']) or 'body'}: {problem['msg']}{came}"


def check_unicode(text: str, param: str, where: str = "") -> None:
    """Raise BadParameter for a text with an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadParameter(param, f"{where or param} is no valid Unicode text: {error.reason}") from error


def check_model(wanted: str | None, model: ServedModel) -> None:
    """Raise UnknownModel if a request wants a model other than the served one."""
    if wanted is not None and wanted != model.name:
        raise UnknownModel(f"model {wanted[:_LONGEST_NAME]!r} is not served here; {model.name!r} is")


def ignored_header(request: RequestBody) -> dict[str, str]:
    """Return the response header that names the request's ignored fields; empty if there are none."""
    names = sorted(request._ignored)
    return {"X-Spire-Ignored": ", ".join(map(shown, names[:_MOST_NAMED]))} if names else {}
