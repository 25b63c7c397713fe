"""JSON in pieces is the JSON of the whole."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st

from gateway.text.json_pieces import Joined, Large, Shared, Shown, chunks_of, pieces_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=200) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


@given(PLAIN)
def test_pieces_put_together_are_the_value(value: Any) -> None:
    assert json.loads(b"".join(pieces_of(value))) == value
    assert b"".join(chunks_of(value)) == b"".join(pieces_of(value))


@given(st.lists(st.lists(st.integers(), max_size=150), max_size=4))
def test_lists_of_all_kinds_are_written_as_lists(lists: list[list[int]]) -> None:
    shown = [Shown(items, str) for items in lists]
    joined = Joined([Shared(lists[0] if lists else []), *shown])
    value = {"joined": joined, "large": Large(iter(lists)), "shown": shown[:0]}
    texts = [str(item) for items in lists for item in items]
    assert json.loads(b"".join(pieces_of(value))) == {
        "joined": [*(lists[0] if lists else []), *texts],
        "large": lists,
        "shown": [],
    }


def test_what_is_shared_is_made_once_and_the_same_bytes_are_everywhere() -> None:
    made: list[int] = []

    def show(item: int) -> str:
        made.append(item)
        return "x" * 100

    shared = Shared(Shown(range(1000), show))
    places = [list(pieces_of({"logprobs": Joined([shared, [place]])})) for place in range(256)]
    assert len(made) == 1000
    assert len({id(piece) for pieces in places for piece in pieces if len(piece) > 200}) == len([*shared.pieces])


def test_no_piece_exceeds_a_limit_of_list_items_or_letters() -> None:
    value = {"ids": list(range(10**6, 10**6 + 100_000)), "text": "a" * 1_000_000}
    assert max(map(len, pieces_of(value))) <= 1 << 16
    assert len(list(chunks_of(value))) < 40
