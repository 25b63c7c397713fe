"""What all routes that take a body share: JSON read by a schema, and the refusals that OpenAPI declares."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from gateway.engine import Engine
from gateway.errors import BadParameter, UnknownModel
from gateway.peers import Model

Schema = TypeVar("Schema", bound=BaseModel)

_NULL = {"type": "null"}
_REFUSALS = {
    400: "The request is wrong",
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full",
    500: "Internal error",
    503: "No verifier",
    504: "The request took longer than it may",
}


# Whoever keeps errors shall not come to keep what they were about.
_TEXTS = (("prompt",), ("messages",), ("suffix",), ("stop",))


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


# The schema's limits are the served model's: see `gateway/openapi.py`.
ModelName = Annotated[str, Field(json_schema_extra={"format": "model-id"})]
TokenCount = Annotated[int, Field(json_schema_extra={"format": "token-count"})]
TokenId = Annotated[int, Field(json_schema_extra={"format": "token-id", "minimum": 0})]


class RequestBody(BaseModel):
    """A body as it comes: `null` stands for a field's default, and unknown fields are kept apart to be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: ModelName | None = None

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


Body = TypeVar("Body", bound=RequestBody)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route declares about the requests that it refuses."""
    return {status: {"model": ErrorResponse, "description": _REFUSALS[status]} for status in statuses}


def parse(body: bytes, schema: type[Schema]) -> Schema:
    """The body as an object of this schema. Raises BadParameter."""
    try:
        raw = json.loads(body, parse_float=_number, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadParameter("body", f"the body is not valid JSON: {error}", "invalid_json") from error
    if not isinstance(raw, dict):
        raise BadParameter("body", "the body must be a JSON object", "invalid_json")
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise bad_parameter(error.errors(include_url=False)) from error


async def read_body(http: Request, schema: type[Body], engine: Engine) -> tuple[Body, Model]:
    """The body and the model that it is for. Raises BadParameter, NoVerifier or UnknownModel."""
    request = parse(await http.body(), schema)
    model = engine.model
    check_model(request.model, model)
    return request, model


def _number(text: str) -> float:
    """JSON has one kind of number: 5.0 is an integer too."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def bad_parameter(problems: Any) -> BadParameter:
    """What pydantic found wrong, under the name of the first field concerned."""
    param = ".".join(str(part) for part in problems[0]["loc"]) or "body"
    # A union complains once for each of its types, under the type's name: the field's own name is enough.
    param = param.removesuffix(".str").removesuffix(".list[str]").removesuffix(".dict[str,any]")
    return BadParameter(param, "; ".join(map(_told, problems[:8])))


def _told(problem: Any) -> str:
    """What is wrong with a field, and its value if that is short and no text to complete."""
    value, told = problem.get("input"), problem["loc"][:1] not in _TEXTS
    came = f", {value!r} came" if told and isinstance(value, int | float | str) and len(repr(value)) <= 40 else ""
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}{came}"


def check_model(wanted: str | None, model: Model) -> None:
    """Raises UnknownModel for another model than the one that is served."""
    if wanted is not None and wanted != model.name:
        raise UnknownModel(f"model {wanted!r} is not served here; {model.name!r} is")


def ignored_header(request: BaseModel) -> dict[str, str]:
    """A header that names the fields which nobody here knows; none when all are known."""
    names = sorted(request.model_extra or {})
    return {"X-Spire-Ignored": ", ".join(map(_shown, names[:16]))} if names else {}


def _shown(name: str) -> str:
    """In quotes where a header could not end with it."""
    quoted = ascii(name[:64])
    bare = quoted[1:-1]
    return bare if bare and bare == bare.strip() else quoted
