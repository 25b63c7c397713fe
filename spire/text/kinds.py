"""Names of JSON types, for error messages about a value of the wrong type."""

from __future__ import annotations

from typing import Any

_KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def kind_of(value: Any) -> str:
    """Return the JSON type of a value in words, for example "an integer" for 5."""
    return _KINDS.get(type(value), type(value).__name__)
