"""Parses a request's JSON body without holding the interpreter lock (GIL) for long.

While Python's parser runs, other threads can run only when it reads a number. So lists and objects, members of objects,
and values are counted before parsing, and a body with too many of them is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from gateway.errors import BadParameter

MOST_PARTS = 1 << 14
MOST_MEMBERS = 1 << 16
MOST_VALUES = 1 << 19
# For each kind of part: the characters that mark it outside of strings, and the most parts that a body may have.
_SIGNS = {
    "lists and objects": (b"[{", MOST_PARTS),
    "members of objects": (b":", MOST_MEMBERS),
    "values": (b",", MOST_VALUES),
}
_TEXT_OR_OTHER = re.compile(rb'"[^"\\]*+(?:\\(?s:.)[^"\\]*+)*+"?|[^"]{1,65536}')


def read_json(body: bytes) -> Any:
    """Parse a JSON body to Python objects. Raises BadParameter if the body is not JSON, or has too many parts."""
    _check_size(body)
    try:
        return json.loads(body, parse_float=_number, parse_int=_integer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadParameter("body", f"the body is not valid JSON: {error}", "invalid_json") from error


def _check_size(body: bytes) -> None:
    for name, (signs, most) in _SIGNS.items():
        if _count([body], signs) > most and (count := _count(_outside_texts(body), signs)) > most:
            raise BadParameter("body", f"the body has {count} {name}: it may have {most}. Send several requests")


def _count(texts: Iterator[bytes] | list[bytes], signs: bytes) -> int:
    return sum(text.count(sign) for text in texts for sign in signs)


def _outside_texts(body: bytes) -> Iterator[bytes]:
    return (match[0] for match in _TEXT_OR_OTHER.finditer(body) if not match[0].startswith(b'"'))


def _number(text: str) -> float:
    """Convert a JSON number to a float, or to an int if it is integral, such as 5.0: JSON has one kind of number."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _integer(text: str) -> int:
    # A Python function, unlike `int` itself, so that other threads may run here.
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
