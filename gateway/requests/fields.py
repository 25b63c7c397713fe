"""Checks request fields that the schema lacks: fields that would change the answer are refused, others are ignored.

`fields.toml` lists refused and ignored fields. An unlisted field is ignored too, unless its name is one edit away from
that of a supported or refused field that the body lacks: such a field is refused, and the error suggests that name.

Does not know: the meaning of a schema's fields, and the contents of a field without a schema of its own, such as a JSON
schema for the output.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from gateway.errors import BadParameter

# The fewest letters of a suggested name: too many names are one edit away from a shorter one.
_SHORTEST_GUESSED = 4
_MOST_SHOWN = 64
# The most distinct unknown names of a body: each is compared with all known names.
_MOST_UNKNOWN = 64
_UNKNOWN = "unknown_parameter"


@dataclass(frozen=True)
class PartOf:
    """Annotates a field that pydantic does not parse: the objects in the field have the fields of `schema`."""

    schema: type[BaseModel]


class Refusal(NamedTuple):
    """An unsupported field of requests: its values without effect, which are accepted, and the field to use instead."""

    neutral: tuple[Any, ...]
    instead: str = ""


@dataclass(frozen=True, eq=False)
class Lists:
    """The request fields that a group of routes refuses or ignores, by dotted path."""

    refused: dict[str, Refusal]
    ignored: frozenset[str]

    def refused_inside(self, kind: str) -> set[str]:
        """Return the names of the refused fields of the object at the dotted path `kind`."""
        return {name for parent, _, name in (path.rpartition(".") for path in self.refused) if parent == kind}


def _refusals(table: dict[str, Any]) -> dict[str, Refusal]:
    entries = {path: entry if isinstance(entry, dict) else {"neutral": entry} for path, entry in table.items()}
    return {path: Refusal(tuple(entry["neutral"]), entry.get("instead", "")) for path, entry in entries.items()}


def _read_lists() -> tuple[Lists, Lists]:
    """Read the lists of refused and ignored fields: for the generation routes and for the tokenization routes."""
    table = tomllib.loads((Path(__file__).parent / "fields.toml").read_text(encoding="utf-8"))
    generation = Lists(_refusals(table["refused"]), frozenset(table["ignored"]["names"]))
    of_messages = {path: refusal for path, refusal in generation.refused.items() if path.startswith("messages.")}
    refused = of_messages | _refusals(table["tokenization"]["refused"])
    return generation, Lists(refused, generation.ignored | generation.refused.keys() - refused.keys())


GENERATION, TOKENIZATION = _read_lists()


def ignored_fields(body: dict[str, Any], schema: type[BaseModel], lists: Lists) -> list[str]:
    """Return the distinct dotted paths of a body's ignored fields. Raises BadParameter for a refused field.

    A field that is `null` counts as absent.
    """
    return list(dict.fromkeys(_ignored(body, schema, _Unknown(lists), "", "")))


def _ignored(body: dict[str, Any], schema: type[BaseModel], unknown: _Unknown, kind: str, where: str) -> Iterator[str]:
    """Yield the ignored fields of an object at the dotted path `kind`; `where` is that path with list indexes."""
    lists = unknown.lists
    fields = _fields_of(schema)
    for name, value in body.items():
        path, place = _join(kind, name), _join(where, name)
        if value is None:
            continue
        if name in fields:
            yield from _ignored_in(value, fields[name], unknown, path, place)
        elif path in lists.refused:
            _check(lists.refused[path], value, place)
        elif path in lists.ignored:
            yield path
        elif not getattr(schema, "passes_others_on", False):
            if (guess := unknown.meant_by(name, schema, kind, place)) and body.get(guess) is None:
                raise BadParameter(shown(place), f"{shown(place)} is not known: did you mean {guess}?", _UNKNOWN)
            if schema.model_config.get("extra") == "forbid":
                message = f"{shown(place)} is not known: {kind} has {', '.join(fields)}"
                raise BadParameter(shown(place), message, _UNKNOWN)
            yield path


def _ignored_in(value: Any, part: type[BaseModel] | None, unknown: _Unknown, path: str, place: str) -> Iterator[str]:
    """Yield the ignored fields of a value that is an object of the schema `part` or a list of such objects."""
    if part is not None:
        for at, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, dict):
                yield from _ignored(item, part, unknown, path, place if at is None else f"{place}[{at}]")


def _check(refusal: Refusal, value: Any, place: str) -> None:
    """Raise BadParameter for a refused field unless its value has no effect."""
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in refusal.neutral):
        neutral = " or ".join(json.dumps(value) for value in refusal.neutral)
        advice = f"use {refusal.instead} instead" if refusal.instead else "leave it out"
        nothing = f", or send {neutral}" if neutral else ""
        raise BadParameter(place, f"{place} is not supported: {advice}{nothing}", "unsupported_parameter")


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def shown(name: str) -> str:
    """Return a field's name for errors and headers: shortened, in ASCII, quoted if empty or with outer spaces."""
    quoted = ascii(name[:_MOST_SHOWN])
    bare = quoted[1:-1]
    return bare if bare and bare == bare.strip() else quoted


@cache
def _fields_of(schema: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Return a schema's fields by their names in requests, each with the schema of the objects in it, or None."""
    return {
        info.alias or name: next((part for part in map(_part_in, [info.annotation, *info.metadata]) if part), None)
        for name, info in schema.model_fields.items()
    }


def _part_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, PartOf):
        return annotation.schema
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((part for part in map(_part_in, get_args(annotation)) if part), None)


@dataclass(frozen=True, eq=False)
class _Unknown:
    """The unknown field names of one body by the path of their object, each with the known name that it resembles."""

    lists: Lists
    _meant: dict[tuple[str, str], str | None] = field(default_factory=dict)

    def meant_by(self, name: str, schema: type[BaseModel], kind: str, place: str) -> str | None:
        """Return the known name that `name` resembles, or None. Raises BadParameter for too many unknown names."""
        if (kind, name) not in self._meant:
            if len(self._meant) == _MOST_UNKNOWN:
                message = f"{shown(place)} is not known, like {_MOST_UNKNOWN} others: leave them out"
                raise BadParameter(shown(place), message, _UNKNOWN)
            self._meant[kind, name] = _guess(name[:_MOST_SHOWN], schema, self.lists, kind)
        return self._meant[kind, name]


def _guess(name: str, schema: type[BaseModel], lists: Lists, kind: str) -> str | None:
    """Return the known field name with the same letters, or with one inserted, deleted, replaced or moved; or None."""
    letters = _letters(name)
    whole, near = _spellings(schema, lists, kind)
    if letters in whole:
        return whole[letters]
    found = {known for shorter in _one_less(letters) for known in near.get(shorter, ())}
    slips = {known for known in found if _is_one_slip(letters, _letters(known))}
    # Letters that changed their places are a smaller slip than others that came and went.
    moved = {known for known in found if sorted(_letters(known)) == sorted(letters)}
    return next(iter(get_close_matches(name, sorted(slips or moved), 1, 0)), None)


def _is_one_slip(one: str, other: str) -> bool:
    """Return True if the texts differ by one letter, or by two neighbours that changed places."""
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    return max(len(one), len(other)) <= 1 or (len(one) == 2 and one == other[::-1])


@cache
def _spellings(schema: type[BaseModel], lists: Lists, kind: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the known field names of an object by their letters, and by their letters with at most one omitted."""
    known = sorted({*_fields_of(schema), *lists.refused_inside(kind)})
    near: dict[str, list[str]] = {}
    for name in known:
        if len(letters := _letters(name)) >= _SHORTEST_GUESSED:
            for shorter in _one_less(letters):
                near.setdefault(shorter, []).append(name)
    return {_letters(name): name for name in known}, near


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _one_less(letters: str) -> set[str]:
    """Return the string `letters` and every string made by omitting one of its letters."""
    return {letters, *(letters[:at] + letters[at + 1 :] for at in range(len(letters)))}
