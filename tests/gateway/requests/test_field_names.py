"""A name that is nearly a field's is refused with the one that was meant; what is far from all is ignored and named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from gateway.api.chat import ChatRequest
from gateway.requests import fields
from gateway.requests.bodies import RequestBody, ignored_header
from gateway.requests.schemas import CompletionRequest
from tests.gateway.requests.bodies import ROUTES, TABLE, every_route, read, refusal

# A slip in another name costs nothing.
KNOWN = {
    route: sorted({field.alias or name for name, field in route.model_fields.items()} | route.lists.refused_inside(""))
    for route in ROUTES
}
known_names = st.sampled_from([(route, name) for route in ROUTES for name in KNOWN[route]])


def letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def edits(one: str, other: str) -> int:
    """Letters more, less, other or exchanged with their neighbour, that make one text the other."""
    rows = [list(range(len(other) + 1))]
    for i in range(1, len(one) + 1):
        rows.append([i])
        for j in range(1, len(other) + 1):
            same = one[i - 1] == other[j - 1]
            best = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (not same))
            if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
                best = min(best, rows[i - 2][j - 2] + 1)
            rows[i].append(best)
    return rows[-1][-1]


@st.composite
def misspelt(draw: st.DrawFn) -> tuple[type[RequestBody], str, str]:
    """A route, the name of a field of four letters or more, and what one slip makes of it."""
    route, name = draw(known_names.filter(lambda case: len(letters(case[1])) >= 4))
    spot = draw(st.integers(0, len(name) - 1).filter(lambda spot: name[spot] != "_"))
    other = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz"))
    slips = [name[:spot] + name[spot + 1 :], name[:spot] + other + name[spot + 1 :], name[:spot] + other + name[spot:]]
    if spot + 1 < len(name):
        slips.append(name[:spot] + name[spot + 1] + name[spot] + name[spot + 2 :])
    return route, name, draw(st.sampled_from(slips))


@given(misspelt())
@example((ChatRequest, "max_tokens", "mnx_tokens"))
@example((ChatRequest, "forced_bos_token_id", "forced_obs_token_id"))
def test_a_slip_in_a_name_is_refused_with_the_name_that_was_meant(case: tuple[type[RequestBody], str, str]) -> None:
    route, name, slip = case
    if slip in KNOWN[route] or slip in route.lists.ignored:
        return
    error = refusal(route, **{name: None, slip: 1})
    assert (error.param, error.code) == (slip, "unknown_parameter")
    meant = str(error).partition("did you mean ")[2].rstrip("?")
    assert meant == name or (meant in KNOWN[route] and edits(letters(slip), letters(meant)) <= 1)


def camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.title, others))


@given(known_names, st.sampled_from([str.upper, str.title, camel, lambda name: name.replace("_", "-")]))
def test_another_way_to_write_a_name_is_refused_with_ours(case: tuple[type[RequestBody], str], style: Any) -> None:
    route, name = case
    written = style(name)
    if written not in KNOWN[route]:
        assert str(refusal(route, **{name: None, written: 1})) == f"{written} is not known: did you mean {name}?"


@every_route
@pytest.mark.parametrize("name", sorted(name for name in TABLE["ignored"]["names"] if "." not in name))
def test_a_slip_in_the_name_of_a_field_that_is_ignored_costs_nothing(route: type[RequestBody], name: str) -> None:
    slip = f"{name}s"
    if all(edits(letters(slip), letters(known)) > 1 for known in KNOWN[route]):
        assert ignored_header(read(route, **{slip: 1})) == {"X-Spire-Ignored": slip}


def unknown_in(route: type[RequestBody], names: list[str], depth: int) -> dict[str, Any]:
    """A body with these names, none of them known: at its top, in one object or in many."""
    fields = dict.fromkeys(names, 1)
    if depth == 0:
        return fields
    if depth == 1:
        return {"stream": True, "stream_options": fields}
    parts = [{"type": "text", "text": "x", name: 1} for name in names]
    return {"messages": [{"role": "user", "content": parts}]}


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were compared with those that are known."""
    names: list[str] = []
    guess = fields._guess

    def count(name: str, *others: Any) -> str | None:
        names.append(name)
        return guess(name, *others)

    monkeypatch.setattr(fields, "_guess", count)
    return names


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("number", [64, 65, 5000])
def test_only_so_many_names_are_guessed_for_and_the_next_is_refused(
    guessed: list[str], number: int, depth: int
) -> None:
    names = [f"wibble{at}" + "x" * 70 for at in range(number)]
    body = unknown_in(ChatRequest, names, depth)
    if number == 64:
        assert len(ignored_header(read(ChatRequest, **body))["X-Spire-Ignored"].split(", ")) == 16
    else:
        error = refusal(ChatRequest, **body)
        place = ("", "stream_options.", "messages[0].content[64].")[depth] + names[64]
        assert (error.param, error.code) == (fields.shown(place), "unknown_parameter")
        assert "like 64 others" in str(error)
    assert guessed == [name[:64] for name in names[:64]]


def test_one_unknown_name_in_many_objects_is_one(guessed: list[str]) -> None:
    parts = [{"type": "text", "text": "x", "wibble": 1} for _ in range(1000)]
    request = read(ChatRequest, messages=[{"role": "user", "content": parts}])
    assert ignored_header(request) == {"X-Spire-Ignored": "messages.content.wibble"}
    assert guessed == ["wibble"]


def test_who_sends_a_field_does_not_misspell_it_too() -> None:
    assert ignored_header(read(CompletionRequest, prompts=5)) == {"X-Spire-Ignored": "prompts"}
    assert "did you mean temperature?" in str(refusal(CompletionRequest, temperatur=1))
    assert ignored_header(read(CompletionRequest, temperatur=1, temperature=1)) == {"X-Spire-Ignored": "temperatur"}


@given(st.sampled_from(ROUTES), st.text(min_size=1, max_size=30))
def test_a_name_that_is_far_from_all_is_ignored_and_named(route: type[RequestBody], name: str) -> None:
    if any(edits(letters(name), letters(known)) <= 2 for known in KNOWN[route]):
        return
    request = read(route, **{name: 1})
    assert ignored_header(request) == {"X-Spire-Ignored": fields.shown(name)}


@pytest.mark.parametrize(
    ("body", "param", "meant"),
    [
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", "include_usage"),
        ({"speculation": {"Draft": "off"}}, "speculation.Draft", "draft"),
        ({"response_format": {"typ": "text"}}, "response_format.typ", "type"),
    ],
)
def test_a_slip_inside_a_field_is_refused_too(body: dict[str, Any], param: str, meant: str) -> None:
    error = refusal(CompletionRequest, **body)
    assert (error.param, error.code) == (param, "unknown_parameter")
    assert f"did you mean {meant}?" in str(error)
