"""The `format`s of a JSON schema that are enforced. All others are annotations, as JSON Schema defines.

The library refuses a whole schema for one format that it does not know.
"""

from __future__ import annotations

from typing import Any

# The formats that the library knows.
ENFORCED = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
# Keywords whose values are data, even if they look like schemas, and keywords whose values are schemas by name.
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})


def with_enforced_formats(schema: Any) -> Any:
    """Return the schema without formats that are not enforced, at every depth."""
    if isinstance(schema, list):
        return [with_enforced_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: _inside(keyword, value)
        for keyword, value in schema.items()
        if keyword != "format" or not isinstance(value, str) or value in ENFORCED
    }


def _inside(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _NAMED and isinstance(value, dict):
        return {name: with_enforced_formats(schema) for name, schema in value.items()}
    return with_enforced_formats(value)
