"""What a stop head learns from is collected once, and goes on where it was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spire.errors import DataError
from spire.model.draft import Draft
from spire.model.target import Target
from spire.training.draft import DraftRecipe, load_pair, source_of
from spire.training.sources import Source
from spire.training.stopping import samples
from spire.training.stopping.samples import Samples, collect
from tests.conftest import FIXTURES

TEXT = FIXTURES / "text" / "jowett_charmides.txt"

Pair = tuple[Target, Draft, Source]


@pytest.fixture
def pair(stories_dir: Path, stories_draft_dir: Path) -> Pair:
    target, draft = load_pair(stories_dir, stories_draft_dir, "cpu")
    recipe = DraftRecipe(seed=3, tokens_per_step=64, short_length=64, long_length=64)
    return target, draft, source_of([TEXT], stories_dir, target, draft.draft.target_fingerprint, recipe)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def collected(pair: Pair, count: int, k: int = 4) -> Samples:
    target, draft, source = pair
    return collect(draft, target, source, count, k, 5, "drafting")


def assert_equal(one: Samples, other: Samples) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("no_cache")
def test_after_an_interruption_collecting_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    judge, calls = samples.judged_blocks, iter(range(20))

    def interrupted(*given: object) -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return judge(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(samples, "judged_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collected(pair, 2000)
    monkeypatch.setattr(samples, "judged_blocks", judge)
    resumed = collected(pair, 2000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("other")))
    assert_equal(resumed, collected(pair, 2000))


@pytest.mark.usefixtures("no_cache")
def test_what_was_collected_is_not_collected_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    first = collected(pair, 1000)
    monkeypatch.setattr(samples, "judged_blocks", None)
    assert_equal(first, collected(pair, 1000))
    assert_equal(first.part(0, 500), collected(pair, 500))
    with pytest.raises(TypeError):
        collected(pair, 1000, k=3)


@pytest.mark.usefixtures("no_cache")
def test_text_without_room_for_a_block_is_refused(pair: Pair) -> None:
    with pytest.raises(DataError, match="as long as a block of 64 tokens"):
        collected(pair, 1000, k=64)
