"""What all routes that take a body share: JSON read by a schema, and the refusals that OpenAPI declares."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue, models_json_schema
from pydantic_core import CoreSchema

from gateway.errors import BadParameter, UnknownModel
from gateway.peers import Model

Schema = TypeVar("Schema", bound=BaseModel)

_COMPONENTS = "#/components/schemas/{model}"
_NULL = {"type": "null"}
_REFUSALS = {
    400: "The request is wrong",
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full",
    500: "Internal error",
    503: "No verifier",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class RequestBody(BaseModel):
    """A body as it comes: `null` stands for a field's default, and unknown fields are kept apart to be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, raw: Any) -> Any:
        return {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else raw

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema)
        either = {name for choice in fields.get("oneOf", []) for name in choice["required"]}
        for name in fields["properties"].keys() - {*fields.get("required", [])}:
            fields["properties"][name] = _nullable(fields["properties"][name], name not in either)
        return schema


def _nullable(field: JsonSchemaValue, nullable: bool) -> JsonSchemaValue:
    about = {name: field[name] for name in ("title", "description", "default") if name in field}
    kinds = field.get("anyOf") or [{name: value for name, value in field.items() if name not in about}]
    kinds = [kind for kind in kinds if kind != _NULL]
    return about | {"anyOf": [*kinds, _NULL] if nullable else kinds}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route declares about the requests that it refuses."""
    return {status: {"model": ErrorResponse, "description": _REFUSALS[status]} for status in statuses}


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """What a route declares about its body; `declare` adds the schema itself."""
    reference = {"$ref": _COMPONENTS.format(model=schema.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def declare(app: FastAPI, *bodies: type[BaseModel]) -> dict[str, Any]:
    """The application's OpenAPI document with the schemas of these bodies."""
    document = app.openapi()
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_COMPONENTS)
    document["components"]["schemas"] |= definitions["$defs"]
    return document


def parse(body: bytes, schema: type[Schema]) -> Schema:
    """The body as an object of this schema. Raises BadParameter."""
    try:
        raw = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadParameter("body", f"the body is not valid JSON: {error}", "invalid_json") from error
    if not isinstance(raw, dict):
        raise BadParameter("body", "the body must be a JSON object", "invalid_json")
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise bad_parameter(error.errors(include_url=False)) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def bad_parameter(problems: Any) -> BadParameter:
    """What pydantic found wrong, under the name of the first field concerned."""
    param = ".".join(str(part) for part in problems[0]["loc"]) or "body"
    # A union complains once for each of its types, under the type's name: the field's own name is enough.
    param = param.removesuffix(".str").removesuffix(".list[str]").removesuffix(".dict[str,any]")
    return BadParameter(param, "; ".join(map(_told, problems[:8])))


def _told(problem: Any) -> str:
    """What is wrong with a field, and its value if that is short."""
    value = problem.get("input")
    came = f", {value!r} came" if isinstance(value, int | float | str) and len(repr(value)) <= 40 else ""
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}{came}"


def check_model(wanted: str | None, model: Model) -> None:
    """Raises UnknownModel for another model than the one that is served."""
    if wanted is not None and wanted != model.name:
        raise UnknownModel(f"model {wanted!r} is not served here; {model.name!r} is")


def ignored_header(request: BaseModel) -> dict[str, str]:
    """A header that names the fields which nobody here knows; none when all are known."""
    names = sorted(request.model_extra or {})
    return {"X-Spire-Ignored": ", ".join(ascii(name)[1:-1][:64] for name in names[:16])} if names else {}
