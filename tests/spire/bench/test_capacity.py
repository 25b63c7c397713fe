"""`spire capacity`: the search finds the border, and what is refused is told apart from what is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from spire.bench.capacity import Arriving, run, search
from spire.bench.client import Request
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.cli import app
from tests.services import Services, running


@given(border=st.floats(0.1, 2000))
def test_the_search_ends_within_a_sixth_of_the_border(border: float) -> None:
    asked: list[float] = []

    def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= border

    search(holds)
    best = max(rate for rate in asked if rate <= border)
    assert best * 1.16 > border
    assert len(asked) < 25


@pytest.mark.parametrize("answer", [True, False])
def test_a_search_without_a_border_ends(answer: bool) -> None:
    asked: list[float] = []
    search(lambda rate: asked.append(rate) or answer)
    assert len(asked) < 15


@pytest.fixture(scope="module")
def narrow(stories_dir: Path) -> Iterator[Services]:
    """Room for two sequences and no queue to speak of."""
    options = ["--max-waiting", "1"]
    with running(stories_dir, verifier_options=["--max-sequences", "2"], gateway_options=options) as services:
        yield services


def arriving(model: Path, generate: int) -> Arriving:
    return Arriving(PromptSource(model, [BUNDLED_TEXT]), 16, Request(generate, 1.0, 0), 1.0)


@pytest.mark.thorough
def test_a_trial_tells_who_was_refused_and_how_soon(narrow: Services, stories_dir: Path) -> None:
    crowded = run(narrow.url, arriving(stories_dir, 300), rate=40, seed=1)
    assert crowded.refused.keys() == {429}
    assert 0 < sum(crowded.refused.values()) < crowded.requests
    assert crowded.refusal_ms_p95 is not None
    assert not crowded.holds(1e9), "nobody may be refused"
    calm = run(narrow.url, arriving(stories_dir, 4), rate=0.01, seed=1)
    assert (calm.requests, calm.refused) == (2, {})
    assert calm.time_to_first_token_ms_p99 is not None
    assert calm.holds(calm.time_to_first_token_ms_p99)
    assert not calm.holds(calm.time_to_first_token_ms_p99 / 2)


@pytest.mark.thorough
def test_the_command_prints_every_trial_as_json(narrow: Services, stories_dir: Path) -> None:
    arguments = ["capacity", "--url", narrow.url, "--model", str(stories_dir), "--context", "16", "--generate", "8"]
    done = CliRunner().invoke(app, [*arguments, "--seconds", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["trials"]
    assert found["best"] in found["trials"]
    assert found["overload"]["rate"] == 4 * found["best"]["rate"]
