"""Rings between two processes: what comes out is what went in, or is missed, and no name stays behind."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from spire.errors import InvalidRequest
from spire.rpc.carrier import OverwritingRing, OverwritingRingReader, Ring, RingReader
from spire.rpc.tensors import to_wire, without_data
from spire.v1 import draft_pb2, verifier_pb2 as pb
from tests.marks import thoroughly
from tests.paths import ROOT
from tests.rings import put

PAGE = 4096


def message(ring: Ring, rows_RND: Tensor) -> draft_pb2.DraftPacket:
    """As the verifier sends it: the place in the ring, or the bytes."""
    place = put(ring, rows_RND)
    rows = without_data(rows_RND) if place.length else to_wire(rows_RND)
    return draft_pb2.DraftPacket(rows=rows, slice=place)


def rows_of(count: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, 2, 48, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 30), st.sampled_from(["read", "lose"])), max_size=60))
def test_rows_arrive_whole_and_in_order_however_late_they_are_read(steps: list[int | str]) -> None:
    """A number puts so many rows of 192 bytes into a ring of 4,096. Messages may also be lost before they are read."""
    with tempfile.TemporaryDirectory() as name:
        ring = Ring(Path(name), PAGE)
        reader = RingReader(Path(name), ring.offer)
        unread: deque[tuple[draft_pb2.DraftPacket, Tensor]] = deque()

        def read() -> None:
            came, expected = unread.popleft()
            assert torch.equal(reader.rows(came), expected)
            reader.release(came.slice)

        for seed, step in enumerate(steps):
            if isinstance(step, int):
                rows = rows_of(step, seed)
                unread.append((message(ring, rows), rows))
            elif unread:
                read() if step == "read" else unread.popleft()
        while unread:
            read()
        # Whatever was lost: what is read after it frees its place.
        ending = message(ring, rows_of(1, 0))
        reader.release(ending.slice)
        assert message(ring, rows_of(PAGE // 192, 0)).slice.length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_fits_is_not_in_the_message(tmp_path: Path, dtype: torch.dtype) -> None:
    ring = Ring(tmp_path, PAGE)
    reader = RingReader(tmp_path, ring.offer)
    rows = rows_of(10, 1, dtype)
    sent = message(ring, rows)
    assert not sent.rows.data
    found = reader.rows(draft_pb2.DraftPacket.FromString(sent.SerializeToString()))
    assert found.dtype == dtype
    assert torch.equal(found, rows)


def test_a_full_ring_takes_nothing_until_something_is_read(tmp_path: Path) -> None:
    ring = Ring(tmp_path, PAGE)
    reader = RingReader(tmp_path, ring.offer)
    first, second, third = (put(ring, rows_of(10, seed)) for seed in range(3))
    assert [bool(place.length) for place in (first, second, third)] == [True, True, False]
    reader.release(first)
    assert put(ring, rows_of(10, 3)).length


def test_a_reader_lying_about_its_progress_breaks_only_its_own_rows(tmp_path: Path) -> None:
    ring = Ring(tmp_path, PAGE)
    reader = RingReader(tmp_path, ring.offer)
    reader.release(pb.RingSlice(position=2**63 - 1))
    for seed in range(20):
        sent = message(ring, rows_of(7, seed))
        assert torch.equal(reader.rows(sent), rows_of(7, seed))


@pytest.mark.parametrize(
    ("position", "length"), [(PAGE - 64, 128), (64, PAGE), (1, 64), (2**64 - 64, 64), (2**63, 0), (0, 2**64 - 1)]
)
def test_a_place_outside_the_ring_is_refused(tmp_path: Path, position: int, length: int) -> None:
    ring = Ring(tmp_path, PAGE)
    reader = RingReader(tmp_path, ring.offer)
    sent = message(ring, rows_of(1, 0))
    sent.slice.CopyFrom(pb.RingSlice(position=position, length=length))
    with pytest.raises(InvalidRequest, match=str(position)):
        reader.rows(sent)


def test_a_place_of_another_size_than_its_rows_is_refused(tmp_path: Path) -> None:
    ring = Ring(tmp_path, PAGE)
    reader = RingReader(tmp_path, ring.offer)
    sent = message(ring, rows_of(2, 0))
    sent.slice.length -= 64
    with pytest.raises(InvalidRequest, match="needs 384 bytes, 320 came"):
        reader.rows(sent)


def test_a_file_without_the_token_is_not_the_ring_and_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "spire-another.ring"
    other.write_bytes(bytes(2 * PAGE))
    offer = pb.Ring(name=other.name, token=b"0123456789abcdef")
    with pytest.raises(InvalidRequest, match="is not the ring"):
        RingReader(tmp_path, offer)
    assert other.exists()


def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    ring = Ring(tmp_path, PAGE)
    with pytest.raises(InvalidRequest, match="file name"):
        RingReader(tmp_path / "inside", pb.Ring(name=f"../{ring.offer.name}", token=ring.offer.token))


def test_the_name_goes_when_the_ring_is_opened_or_given_up(tmp_path: Path) -> None:
    opened, given_up = Ring(tmp_path, PAGE), Ring(tmp_path, PAGE)
    assert len(list(tmp_path.iterdir())) == 2
    reader = RingReader(tmp_path, opened.offer)
    assert [file.name for file in tmp_path.iterdir()] == [given_up.offer.name]
    del given_up
    assert not list(tmp_path.iterdir())
    assert torch.equal(reader.rows(message(opened, rows_of(3, 0))), rows_of(3, 0)), "it works without a name"


def test_a_directory_that_cannot_hold_the_ring_raises_and_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space|too large"):
        Ring(tmp_path, 2**50)
    assert not list(tmp_path.iterdir())


def test_a_killed_makers_ring_is_removed_by_the_next_and_a_live_one_stays(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from spire.rpc.carrier import Ring\n"
        f"ring = Ring(Path(sys.argv[1]), {PAGE}); print(ring.offer.name, flush=True); time.sleep(60)"
    )
    alive = Ring(tmp_path, PAGE)
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        abandoned = maker.stdout.readline().strip()
        maker.kill()
    assert (tmp_path / abandoned).exists()
    newest = Ring(tmp_path, PAGE)
    assert {file.name for file in tmp_path.iterdir()} == {alive.offer.name, newest.offer.name}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30)), max_size=40))
def test_an_overwriting_ring_gives_what_was_put_or_says_that_it_is_gone(steps: list[tuple[int, int]]) -> None:
    """Each step puts so many rows of 192 bytes into a ring of 4,096 and reads what was put so many steps before."""
    with tempfile.TemporaryDirectory() as name:
        reader = OverwritingRingReader(Path(name), PAGE)
        ring = OverwritingRing(Path(name), reader.offer)
        done: list[tuple[Tensor, pb.RingSlice]] = []
        for seed, (count, back) in enumerate(steps):
            rows = rows_of(count, seed)
            place = put(ring, rows)
            assert bool(place.length) == (0 < rows.nbytes <= PAGE // 4)
            done.append((rows, place))
            rows, place = done[-1 - back % len(done)]
            if place.length:
                found = reader.view(without_data(rows), place)
                newest = max(later.position + later.length for _, later in done)
                assert (found is None) == (place.position < newest - PAGE)
                assert found is None or torch.equal(found, rows)


def test_what_was_written_over_while_it_was_read_is_gone(tmp_path: Path) -> None:
    reader = OverwritingRingReader(tmp_path, PAGE)
    ring = OverwritingRing(tmp_path, reader.offer)
    rows = rows_of(5, 0)
    place = put(ring, rows)
    found = reader.view(without_data(rows), place)
    assert found is not None
    assert torch.equal(found, rows)
    assert reader.holds(place)
    for seed in range(4):
        put(ring, rows_of(5, seed))
    assert not reader.holds(place)
    assert reader.view(without_data(rows), place) is None


def test_what_is_written_where_it_was_claimed_is_as_if_put(tmp_path: Path) -> None:
    reader = OverwritingRingReader(tmp_path, PAGE)
    ring = OverwritingRing(tmp_path, reader.offer)
    numbers = [rows_of(3, seed) for seed in range(2)]
    claims = [ring.claim(x.shape, x.dtype) for x in numbers]
    places = []
    for claim, x in zip(claims, numbers, strict=True):
        assert claim is not None
        claim[0].copy_(x)
        places.append(claim[1])
    places.append(put(ring, numbers[0]))
    for place, x in zip(places, (*numbers, numbers[0]), strict=True):
        found = reader.view(without_data(x), place)
        assert found is not None
        assert torch.equal(found, x)
    assert ring.claim((PAGE,), torch.uint8) is None, "a place as large as the ring"


def test_a_place_in_another_overwriting_ring_is_none_in_this_one(tmp_path: Path) -> None:
    readers = [OverwritingRingReader(tmp_path, PAGE) for _ in range(2)]
    rings = [OverwritingRing(tmp_path, reader.offer) for reader in readers]
    rows = rows_of(5, 0)
    places = [put(ring, rows) for ring in rings]
    assert readers[0].view(without_data(rows), places[0]) is not None
    assert readers[0].view(without_data(rows), places[1]) is None
    assert readers[1].view(without_data(rows), places[0]) is None
    nowhere = pb.RingSlice(position=places[0].position + 64 * 1024, length=rows.nbytes)
    assert readers[0].view(without_data(rows), nowhere) is None, "nothing was written there yet"


def test_a_place_around_the_end_of_an_overwriting_ring_is_refused(tmp_path: Path) -> None:
    reader = OverwritingRingReader(tmp_path, PAGE)
    ring = OverwritingRing(tmp_path, reader.offer)
    last = [put(ring, rows_of(5, seed)) for seed in range(5)][-1]
    around = pb.RingSlice(position=last.position - 192, length=384)
    with pytest.raises(InvalidRequest, match="do not lie in a ring"):
        reader.view(without_data(rows_of(2, 0)), around)


@pytest.mark.parametrize("way", [thoroughly("inline"), "shared_memory"])
def test_the_benchmark_sends_every_byte_by_the_carrier_it_names(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    script = importlib.import_module("carrier")
    found = script.measure(script.SHAPES[-1], way, 3, tmp_path, 1)
    assert 0 < found["copy_ms"]["p50"] < found["ms"]["p50"] <= found["ms"]["p99"]
