"""What holds of the performance model for any shape, batch, context, depth and τ."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

from spire.cli import app
from spire.perf.hardware import GPUS, Hardware, gpu
from spire.perf.memory_need import SHARE_OF_FREE_MEMORY, MemoryNeed, largest_batch, of_draft, of_target
from spire.perf.perf_model import draft_seconds, multiplier, plain_cost, round_cost, split_cost, verify_seconds
from spire.perf.shapes import DraftKind, DraftShape, Shape, trained_draft
from spire.perf.wire import Carrier, Wire, wire_of

LONGEST = 65536


class Point(NamedTuple):
    """Arguments of `multiplier`."""

    target: Shape
    draft: DraftShape
    batch: int
    context: int
    k: int
    tau: float
    hardware: Hardware


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads, groups, head_dim = (
        draw(st.integers(1, 8)),
        draw(st.integers(1, 8)),
        draw(st.sampled_from([16, 64, 128])),
    )
    heads = kv_heads * groups
    width = draw(st.sampled_from([64, 256, 1024, 4096]))
    vocabulary = draw(st.integers(64, 200_000))
    return Shape(draw(st.integers(1, 80)), width, draw(st.integers(64, 30_000)), heads, kv_heads, head_dim, vocabulary)


@st.composite
def points(draw: st.DrawFn, kinds: tuple[DraftKind, ...] = ("spire", "vanilla", "magicdec")) -> Point:
    target, k = draw(shapes()), draw(st.integers(1, 16))
    tau = draw(st.floats(1.0, k + 1))
    draft = trained_draft(draw(st.sampled_from(kinds)), target)
    batch, context = draw(st.integers(1, 512)), draw(st.integers(1, LONGEST))
    return Point(target, draft, batch, context, k, tau, gpu(draw(st.sampled_from(list(GPUS)))))


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(points(kinds=("spire", "vanilla")), st.floats(0, 100))
def test_the_table_the_one_device_row_and_json_say_the_same(point: Point, price: float) -> None:
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(_config(point.target)))
        options = ["--target", directory, "--draft", point.draft.kind, "--hardware", point.hardware.name, "--split"]
        options += [f"--{name}={getattr(point, name)}" for name in ("batch", "context", "k", "tau")]
        options += [f"--price={price}", "--max-k=1", "--batches=1", "--contexts=1"]
        report = json.loads(_printed(*options, "--json"))
        shown = [line.split() for line in _printed(*options).splitlines() if line]
    (row,), (plain, together, _) = report["drafts"], report["deployments"]
    assert row == {name: value for name, value in together.items() if name != "deployment"}
    assert row["multiplier"] == pytest.approx(multiplier(*point._replace(tau=row["tau"])))
    assert row["multiplier"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
    assert row["round_ms"] == pytest.approx(row["draft_ms"] + row["wire_ms"] + row["verify_ms"])
    assert plain == {"draft": row["draft"], "deployment": "plain"} | report["plain"]
    in_table = [line[1:] for line in shown if line[0] == point.draft.kind]
    in_deployments = [line[2:] for line in shown if line[:2] == ["one", "device"]]
    assert in_table == in_deployments
    assert in_table[0][-3:-1] == [f"{row[name]:.2f}" for name in ("multiplier", "paper_multiplier")]


@given(points(), st.sampled_from(["cuda_ipc", "shared_memory", "grpc"]))
def test_no_wire_is_free_at_a_bandwidth_that_a_device_has(point: Point, carrier: Carrier) -> None:
    assert round_cost(*point).wire > 0
    assert plain_cost(point.target, point.batch, point.context, point.hardware).wire > 0
    if point.draft.kind != "magicdec":
        assert _split(point, wire_of(carrier, point.hardware)).wire > 0


@given(points(kinds=("spire", "vanilla")))
def test_a_split_tends_to_the_slower_of_its_sides_as_bandwidth_grows(point: Point) -> None:
    lane = point.batch / 2
    drafting = draft_seconds(point.draft, lane, point.context, point.k, point.hardware)
    verifying = verify_seconds(point.target, lane, point.context, point.k, point.hardware)
    floor, excess = max(drafting, verifying), []
    for bytes_per_second in (1e9, 1e12, 1e15, 1e30):
        cost = _split(point, Wire("grpc", 1 / bytes_per_second, 1 / bytes_per_second, 1 / bytes_per_second))
        assert floor <= cost.seconds <= floor + cost.wire
        excess.append(cost.seconds - floor)
    assert excess == sorted(excess, reverse=True)
    assert excess[-1] == pytest.approx(0, abs=1e-12)


@given(points(), st.integers(1, 8), st.integers(1, LONGEST))
def test_what_fits_fits_with_less_and_no_more_than_the_largest_batch_does(
    point: Point, factor: int, context: int
) -> None:
    memory = point.hardware.memory_bytes
    assert memory is not None
    needs = _needs(point, point.context)
    most = largest_batch(needs, memory)
    assert largest_batch(_needs(point, min(point.context, context)), memory) >= most
    assert largest_batch(needs, memory * factor) >= most
    assert most == 0 or _all_find_room(needs, most, memory, SHARE_OF_FREE_MEMORY * (1 + 1e-9))
    assert not _all_find_room(needs, most + 1, memory, SHARE_OF_FREE_MEMORY * (1 - 1e-9))


def _all_find_room(needs: list[MemoryNeed], batch: int, memory: float, share: float) -> bool:
    """Each in turn has its sequences within this share of what is free behind its weights."""
    for need in needs:
        memory -= need.weights
        if batch * need.per_sequence > share * memory:
            return False
        memory -= batch * need.per_sequence
    return True


def _needs(point: Point, context: int) -> list[MemoryNeed]:
    return [of_target(point.target, context, 2), of_draft(point.draft, context, point.k, 2)]


def _split(point: Point, wire: Wire) -> Any:
    return split_cost(*point, point.hardware, wire, 2)


def _printed(*options: str) -> str:
    result = CliRunner().invoke(app, ["perf-model", *options], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": LONGEST,
    }
