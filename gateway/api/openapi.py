"""The OpenAPI document: routes, all their statuses, and body schemas with the limits of the served model.

Routes parse their bodies themselves (`gateway/requests/bodies.py`), so FastAPI does not know the bodies' schemas: this
module adds them. In a schema, these values of `format` stand for limits that the served model or draft sets:
`token-id`, `token-id-text`, `token-count`, `model-id`, `draft-name`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.verifier_client import ServedModel

Limits = dict[str, dict[str, Any]]

_COMPONENTS = "#/components/schemas/{model}"
_UNAUTHORIZED = {
    "description": "No API key, or none that is known",
    "content": {"application/json": {"schema": {"$ref": _COMPONENTS.format(model="ErrorResponse")}}},
    "headers": {"WWW-Authenticate": {"schema": {"type": "string"}}},
}


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """Return a route's OpenAPI declaration of its request body. DocumentedApi adds the schema itself."""
    reference = {"$ref": _COMPONENTS.format(model=schema.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


class DocumentedApi(FastAPI):
    """An application whose OpenAPI document has the schemas of `bodies`, with the current `limits` for each `format`.

    All paths but `open_paths` need an API key; if `open_paths` is None, no path does.
    """

    def __init__(
        self,
        bodies: Sequence[type[BaseModel]],
        limits: Callable[[], Limits],
        open_paths: frozenset[str] | None = None,
        **options: Any,
    ):
        super().__init__(docs_url=None, redoc_url=None, **options)
        self._limits, self._open_paths = limits, open_paths
        _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_COMPONENTS)
        self._bodies = definitions["$defs"]

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document["components"]["schemas"].update(self._bodies)
        if self._open_paths is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    if path in self._open_paths:
                        operation["security"] = []
                    else:
                        operation["responses"]["401"] = _UNAUTHORIZED
        limited: dict[str, Any] = _limited(document, self._limits())
        return limited


def limits_of(model: ServedModel | None, drafts: list[str]) -> Limits:
    """Return the limits that the connected services set: JSON Schema keywords for each `format`."""
    limits: Limits = {"draft-name": {"enum": drafts}}
    if model is None:
        return limits
    largest_id = model.info.vocab_size - 1
    return limits | {
        "token-id": {"maximum": largest_id},
        "token-id-text": {"pattern": f"^({decimals_up_to(largest_id)})$"},
        "token-count": {"maximum": model.info.max_context - 1},
        "model-id": {"enum": [model.name]},
    }


def _limited(node: Any, limits: Limits) -> Any:
    if isinstance(node, list):
        return [_limited(item, limits) for item in node]
    if not isinstance(node, dict):
        return node
    limit = limits.get(node["format"], {}) if isinstance(node.get("format"), str) else {}
    return {name: _limited(value, limits) for name, value in node.items()} | limit


def decimals_up_to(number: int) -> str:
    """Return a regular expression that matches the integers from 0 to `number`, which must have two digits or more."""
    digits = str(number)
    shorter = ["[0-9]", *(f"[1-9][0-9]{{{more}}}" for more in range(1, len(digits) - 1))]
    below = [
        f"{digits[:at]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - at - 1}}}"
        for at, digit in enumerate(digits)
        if int(digit) > (lowest := 0 if at else 1)
    ]
    return "|".join([*shorter, *below, digits])
