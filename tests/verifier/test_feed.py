"""A feed's replay is the sink and the window of each sequence, whatever was stored, ended or replayed before."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spire.v1 import verifier_pb2 as pb
from verifier_service import activations
from verifier_service.activations import Advance, Feed, Taps
from verifier_service.delivery import Delivery, Picked

SLOTS, SINK, WINDOW, WIDTH = 3, 1, 5, 2

# How many positions of each slot's sequence are committed; or whose sequence ends, for another one to take its slot; or
# which are replayed.
steps = st.one_of(
    st.tuples(st.just("store"), st.lists(st.integers(0, 9), min_size=SLOTS, max_size=SLOTS)),
    st.tuples(st.just("end"), st.integers(0, SLOTS - 1)),
    st.tuples(st.just("replay"), st.sets(st.integers(0, SLOTS - 1), min_size=1)),
)


def row(life: int, position: int) -> torch.Tensor:
    """[N, D], like no other position's of any sequence."""
    return torch.full((1, WIDTH), 1000.0 * life + position)


def told(delivery: Delivery) -> dict[str, dict[int, float]]:
    """What a draft holds after a replay: by sequence and position."""
    held: dict[str, dict[int, float]] = {}
    rows = iter(delivery.rows.rows_RND[:, 0, 0].tolist())
    for span in delivery.spans:
        assert isinstance(span, pb.ActivationSpan)
        if span.reset:
            held[span.sequence_id] = {}
        held[span.sequence_id] |= {span.start + at: next(rows) for at in range(span.count)}
    return held


@pytest.mark.parametrize("pending", [0, 7, 256])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(happened=st.lists(steps, max_size=40))
def test_a_replay_holds_sink_and_window_of_what_was_committed(
    pending: int, happened: list[tuple[str, list[int] | int | set[int]]]
) -> None:
    feed = Feed(Taps((1,), SINK, WINDOW), SLOTS, WIDTH, torch.float32, torch.device("cpu"))
    lives, lengths = list(range(SLOTS)), [0] * SLOTS
    for slot, life in enumerate(lives):
        feed.join(f"{life}", slot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "_MOST_PENDING", pending)
        for what, whom in [*happened, ("replay", set(range(SLOTS)))]:
            if isinstance(whom, list):
                grown = [(slot, count) for slot, count in enumerate(whom) if count]
                advances = [Advance(f"{lives[s]}", "d", s, lengths[s], [0] * count) for s, count in grown]
                rows = [row(lives[s], lengths[s] + at) for s, count in grown for at in range(count)]
                if advances:
                    feed.store(advances, torch.stack(rows))
                for slot, count in grown:
                    lengths[slot] += count
            elif isinstance(whom, int):
                assert feed.leave(f"{lives[whom]}")
                lives[whom], lengths[whom] = max(lives) + 1, 0
                feed.join(f"{lives[whom]}", whom)
            else:
                chosen = [slot for slot in sorted(whom) if lengths[slot]]
                held = told(feed.replay([f"{lives[slot]}" for slot in chosen])) if chosen else {}
                assert what == "replay"
                assert held == {
                    f"{lives[s]}": {
                        p: row(lives[s], p)[0, 0].item()
                        for p in range(lengths[s])
                        if p < SINK or p >= lengths[s] - WINDOW
                    }
                    for s in chosen
                }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6), st.booleans(), st.integers(0, 2))
def test_rows_are_gathered_as_torch_indexes_them_wherever_they_go(
    neighbours: list[tuple[int, bool]], all_of_them: bool, layers: int
) -> None:
    counts, kept = [count for count, _ in neighbours], [keep for _, keep in neighbours]
    R = sum(counts)
    from_XND = torch.randn(R if all_of_them else 3 * R + 1, layers, 5).bfloat16()
    places = list(range(R)) if all_of_them else [3 * at + 1 for at in range(R)]
    rows = Picked(from_XND, None if all_of_them else places)
    assert torch.equal(rows.rows_RND, from_XND[places])
    bounds = list(accumulate(counts, initial=0))
    chosen = [p for at, keep in enumerate(kept) if keep for p in places[bounds[at] : bounds[at + 1]]]
    part = rows.of(counts, kept)
    assert (len(part), part.nbytes) == (len(chosen), from_XND[chosen].nbytes)
    there = torch.empty(part.shape, dtype=torch.bfloat16)
    part.gather(there)
    assert torch.equal(there, from_XND[chosen])
