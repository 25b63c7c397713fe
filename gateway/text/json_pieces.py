"""Encodes JSON in pieces, so that no piece takes long to encode and the whole text is never in memory.

A list that occurs several times in an answer, such as the prompt's logprobs in each choice, is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pydantic_core import to_json

# The number of items of a list, and of characters of a string, that are encoded at once.
_ITEMS, _CHARACTERS = 64, 1 << 16
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Shown:
    """A list encoded to JSON as `show(item)` for each of its items, computed during the encoding."""

    items: Sequence[Any]
    show: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.show, self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Large:
    """A list of large items for JSON, produced and encoded one at a time."""

    items: Iterable[Any]


class Shared:
    """A list that is encoded to JSON only once, piece by piece, although it occurs several times in an answer."""

    def __init__(self, items: Shown | list[Any]):
        self._runs, self._encoded = iter(_runs(items)), list[bytes]()

    @property
    def pieces(self) -> Iterator[bytes]:
        for at in count():
            if at == len(self._encoded):
                if (run := next(self._runs, None)) is None:
                    return
                self._encoded.append(run)
            yield self._encoded[at]


@dataclass(frozen=True)
class Joined:
    """Several lists, encoded to JSON as one concatenated list."""

    parts: Sequence[Shared | Shown | list[Any]]


def pieces_of(value: Any) -> Iterator[bytes]:
    """Yield a value's JSON in pieces, small if its large parts are lists, strings, Shown, Large, Shared or Joined."""
    if isinstance(value, dict):
        yield from _enclosed(b"{", (_member(name, item) for name, item in value.items()), b"}")
    elif isinstance(value, Large):
        yield from _enclosed(b"[", map(pieces_of, value.items), b"]")
    elif isinstance(value, Joined | Shared | Shown | list):
        parts = value.parts if isinstance(value, Joined) else [value]
        yield from _enclosed(b"[", ([run] for part in parts for run in _runs(part)), b"]")
    elif isinstance(value, str) and len(value) > _CHARACTERS:
        yield b'"'
        for at in range(0, len(value), _CHARACTERS):
            yield to_json(value[at : at + _CHARACTERS])[1:-1]
        yield b'"'
    else:
        yield to_json(value)


def chunks_of(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in chunks of at least _CHUNK_BYTES bytes; only the last may be smaller."""
    pieces: list[bytes] = []
    size = 0
    for piece in pieces_of(value):
        pieces.append(piece)
        size += len(piece)
        if size >= _CHUNK_BYTES:
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def _member(name: str, item: Any) -> Iterator[bytes]:
    yield to_json(name) + b":"
    yield from pieces_of(item)


def _enclosed(begin: bytes, members: Iterable[Iterable[bytes]], end: bytes) -> Iterator[bytes]:
    yield begin
    for at, member in enumerate(members):
        if at:
            yield b","
        yield from member
    yield end


def _runs(items: Shared | Shown | list[Any]) -> Iterable[bytes]:
    """Return the JSON of a list as parts of several items each, without the list's brackets."""
    if isinstance(items, Shared):
        return items.pieces
    shown = Shown(items, lambda item: item) if isinstance(items, list) else items
    runs = (shown.items[at : at + _ITEMS] for at in range(0, len(shown), _ITEMS))
    return (to_json([shown.show(item) for item in run])[1:-1] for run in runs)
