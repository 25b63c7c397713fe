"""JSON written piece by piece, so that no piece takes long and nobody has to hold all of it.

What is in several places of an answer, as the prompt's logprobs in each of its choices, is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic_core import to_json

# Of a list and of a text, what is written at once.
_ITEMS, _CHARACTERS = 64, 1 << 16
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Shown:
    """A list of what `show` makes of each item, which is made when it is written."""

    items: Sequence[Any]
    show: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.show, self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Large:
    """A list whose items are large: each is made when its turn comes."""

    items: Iterable[Any]


class Shared:
    """A list that is written once, in however many places it is."""

    def __init__(self, items: Shown | list[Any]):
        self._items = items

    @cached_property
    def pieces(self) -> list[bytes]:
        return list(_runs(self._items))


@dataclass(frozen=True)
class Joined:
    """One list made of others."""

    parts: Sequence[Shared | Shown | list[Any]]


def pieces_of(value: Any) -> Iterator[bytes]:
    """The JSON of a value; what is large in it must be one of the above, a long list or a long text."""
    if isinstance(value, dict):
        yield from _enclosed(b"{", (_member(name, item) for name, item in value.items()), b"}")
    elif isinstance(value, Large):
        yield from _enclosed(b"[", map(pieces_of, value.items), b"]")
    elif isinstance(value, Joined):
        yield from _enclosed(b"[", ([run] for part in value.parts for run in _runs(part)), b"]")
    elif isinstance(value, Shared | Shown | list):
        yield from _enclosed(b"[", ([run] for run in _runs(value)), b"]")
    elif isinstance(value, str) and len(value) > _CHARACTERS:
        yield b'"'
        for at in range(0, len(value), _CHARACTERS):
            yield to_json(value[at : at + _CHARACTERS])[1:-1]
        yield b'"'
    else:
        yield to_json(value)


def chunks_of(value: Any) -> Iterator[bytes]:
    """The same in chunks that are worth sending."""
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
    """The items of a list, some of them at a time, without the brackets."""
    if isinstance(items, Shared):
        return items.pieces
    given, show = (items.items, items.show) if isinstance(items, Shown) else (items, _itself)
    runs = (given[at : at + _ITEMS] for at in range(0, len(given), _ITEMS))
    return (to_json([show(item) for item in run])[1:-1] for run in runs)


def _itself(item: Any) -> Any:
    return item
