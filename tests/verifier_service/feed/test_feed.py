"""A feed's replay is the sink and the window of each sequence, whatever was stored, ended or replayed before."""

from __future__ import annotations

import mmap
from itertools import accumulate
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings, strategies as st

from spire.errors import MismatchError
from spire.rpc.channel import PROTOCOL_VERSION
from spire.v1 import draft_pb2, verifier_pb2 as pb
from verifier_service.feed import feed as feeds
from verifier_service.feed.delivery import Delivery, Picked
from verifier_service.feed.feed import Advance, Feed, Taps
from verifier_service.feed.publisher import Publisher

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
        assert isinstance(span, draft_pb2.ActivationSpan)
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
        feed.join(f"{life}", slot, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeds, "MOST_PENDING", pending)
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
                feed.join(f"{lives[whom]}", whom, [])
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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(copied=st.integers(SINK, 20), grown=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_copied_sequence_is_replayed_from_its_first_computed_position(copied: int, grown: list[int]) -> None:
    feed = Feed(Taps((1,), SINK, WINDOW), SLOTS, WIDTH, torch.float32, torch.device("cpu"))
    feed.join("first", 0, [5, 6])
    feed.store([Advance("first", "d", 0, 0, [5, 6])], torch.stack([row(1, at) for at in range(2)]))
    feed.join("other", 1, [4, 6])
    assert not feed.knows_sink("other")
    assert feed.leave("other")
    feed.join("copy", 1, [5, *[7] * 100])
    assert feed.knows_sink("copy")
    feed.skip("copy", length := copied)
    for count in grown:
        rows = torch.stack([row(2, length + at) for at in range(count)])
        feed.store([Advance("copy", "d", 1, length, [7] * count)], rows)
        length += count
        behind = range(max(copied, length - WINDOW), length)
        expected = {0: row(1, 0)[0, 0].item()} | {p: row(2, p)[0, 0].item() for p in behind}
        assert told(feed.replay(["copy"])) == {"copy": expected}


def test_a_copied_sink_stays_when_the_slots_last_sequence_returns() -> None:
    feed = Feed(Taps((1,), SINK, WINDOW), SLOTS, WIDTH, torch.float32, torch.device("cpu"))
    for name, slot, token in (("a", 0, 5), ("b", 1, 6)):
        feed.join(name, slot, [token, 7])
        feed.store([Advance(name, "d", slot, 0, [token, 7])], torch.stack([row(slot + 1, at) for at in range(2)]))
    assert feed.leave("b")
    feed.join("copy", 1, [5, *[7] * 100])
    feed.skip("copy", 64)
    feed.join("b", 2, [6, 7])  # the rows of its former life still wait to be written
    feed.store([Advance("b", "d", 2, 0, [6, 7])], torch.stack([row(3, at) for at in range(2)]))
    assert told(feed.replay(["copy", "b"])) == {"copy": {0: 1000.0}, "b": {0: 3000.0, 1: 3001.0}}


def test_a_copied_sequence_whose_sink_was_lost_leaves_the_feed() -> None:
    """As after a chunk whose activations could not be published: the sequence is decoded plainly."""
    feed = Feed(Taps((1,), SINK, WINDOW), SLOTS, WIDTH, torch.float32, torch.device("cpu"))
    feed.join("copy", 1, [5, *[7] * 100])
    feed.skip("copy", 64)
    assert not feed.members


def test_a_sequence_that_begins_anew_has_nothing_of_its_former_life() -> None:
    publisher = Publisher(SLOTS, WIDTH, torch.float32, torch.device("cpu"), Mock())
    held: list[Delivery] = []
    publisher.subscribe("d", Taps((1,), SINK, WINDOW), held.append)
    publisher.join("a", "d", 0, [5, *[7] * 100])
    publisher.store(publisher.shares([Advance("a", "d", 0, 0, [5])], row(1, 0)[None, None]))
    publisher.store(publisher.shares([Advance("a", "d", 0, 1, [7], paused=True)], row(1, 1)[None, None]))
    publisher.end(["a"])
    publisher.join("a", "d", 2, [5, *[7] * 100])
    publisher.skip("a", "d", 64)
    publisher.replay("d", ["a"])
    assert told(held[-1]) == {"a": {0: 1000.0}}


@pytest.mark.parametrize("pending", [0, 7, 256])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    happened=st.lists(
        st.one_of(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS), st.integers(0, SLOTS - 1)), max_size=40
    )
)
def test_a_draft_holds_sink_and_window_whoever_was_paused_in_which_rounds(
    pending: int, happened: list[list[bool] | int]
) -> None:
    held: dict[str, dict[int, float]] = {}

    def deliver(delivery: Delivery) -> None:
        rows = iter(delivery.rows.rows_RND[:, 0, 0].tolist() if delivery.spans else [])
        for span in delivery.spans:
            assert isinstance(span, draft_pb2.ActivationSpan)
            if span.reset:
                held[span.sequence_id] = {}
            of = held.setdefault(span.sequence_id, {})
            of |= {span.start + at: next(rows) for at in range(span.count)}

    publisher = Publisher(SLOTS, WIDTH, torch.float32, torch.device("cpu"), Mock())
    publisher.subscribe("d", Taps((1,), SINK, WINDOW), deliver)
    lives, lengths = list(range(SLOTS)), [0] * SLOTS
    for slot, life in enumerate(lives):
        publisher.join(f"{life}", "d", slot, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feeds, "MOST_PENDING", pending)
        for whom in [*happened, [False] * SLOTS]:
            if isinstance(whom, int):
                publisher.end([f"{lives[whom]}"])
                lives[whom], lengths[whom] = max(lives) + 1, 0
                publisher.join(f"{lives[whom]}", "d", whom, [])
                continue
            advances = [Advance(f"{lives[s]}", "d", s, lengths[s], [7], whom[s]) for s in range(SLOTS)]
            rows = torch.stack([row(lives[s], lengths[s]) for s in range(SLOTS)])
            shares = publisher.shares(advances, rows[:, None])
            publisher.announce(shares)
            publisher.store(shares)
            lengths = [length + 1 for length in lengths]
    for slot, life in enumerate(lives):
        kept = {p for p in range(lengths[slot]) if p < SINK or p >= lengths[slot] - WINDOW}
        of = held[f"{life}"]
        assert {p: of.get(p) for p in kept} == {p: row(life, p)[0, 0].item() for p in kept}


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


def test_a_feed_holds_memory_only_for_its_current_sequences() -> None:
    """Tails of all 8,000 slots would be 17 GB."""
    before = _resident()
    taps = Taps((1, 2, 3, 4), 1, 64)
    feed = Feed(taps, 8000, 4096, torch.bfloat16, torch.device("cpu"))
    of_one = 65 * 4 * 4096 * 2
    rows = torch.ones(65, 4, 4096, dtype=torch.bfloat16)
    for life in range(20):
        feed.join(f"{life}", life, [])
        feed.store([Advance(f"{life}", "d", life, 0, [0] * 65)], rows)
    feed.replay(["0"])
    assert 12 * of_one <= (held := _resident() - before) <= 40 * of_one
    for life in range(19):
        assert feed.leave(f"{life}")
    assert _resident() - before <= held - 12 * of_one, "each gives its own back"
    assert feed.leave("19")
    assert feed._pool is None


@pytest.mark.parametrize(
    ("sink", "window", "fits"), [(1, 64, True), (24, 1000, True), (25, 1000, False), (8000, 1, False)]
)
def test_a_draft_asking_for_more_positions_than_needed_is_refused_by_name(sink: int, window: int, fits: bool) -> None:
    target = pb.GetInfoResponse(target_fingerprint="ours", num_layers=32, max_context=8000)
    wanted = {"draft_id": "d", "target_fingerprint": "ours", "protocol_version": PROTOCOL_VERSION}
    request = draft_pb2.Subscription(**wanted, tapped_layers=[1], sink=sink, window=window)
    if fits:
        assert (Taps.read(request, target).sink, Taps.read(request, target).window) == (sink, window)
    else:
        with pytest.raises(MismatchError, match=f"sink {sink}, window {window}.*keeps 1024"):
            Taps.read(request, target)


def test_a_draft_that_taps_no_layer_may_see_all_of_the_context() -> None:
    target = pb.GetInfoResponse(target_fingerprint="ours", num_layers=32, max_context=8000)
    wanted = {"draft_id": "d", "target_fingerprint": "ours", "protocol_version": PROTOCOL_VERSION}
    assert Taps.read(draft_pb2.Subscription(**wanted, tokens=True, window=8000), target).window == 8000


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
