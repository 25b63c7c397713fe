"""Training a draft: resumes to the same weights, belongs to its target, refuses what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import spire.training.draft
from spire.errors import DataError
from spire.model.checkpoint import load_draft, load_target
from spire.training.draft import DraftRecipe, new_draft, recipe_for, rollout_loss, train_draft
from tests.conftest import FIXTURES

TEXT = FIXTURES / "text" / "jowett_charmides.txt"
TINY = DraftRecipe(steps=230, tokens_per_step=64, short_length=16, long_length=32, layers=1, window=8)


class _Killed(Exception):
    pass


def train(target: Path, out: Path, recipe: DraftRecipe = TINY, data: Path = TEXT) -> None:
    train_draft(target, [data], [], out, recipe, compiled=False)


def test_an_interrupted_run_resumes_to_the_same_weights_bit_for_bit(
    stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    train(stories_dir, tmp_path / "undisturbed")
    calls = 0

    def dies(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 215:
            raise _Killed
        return rollout_loss(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(spire.training.draft, "rollout_loss", dies)
    with pytest.raises(_Killed):
        train(stories_dir, tmp_path / "resumed")
    assert not (tmp_path / "resumed" / "model.safetensors").exists()
    monkeypatch.undo()
    train(stories_dir, tmp_path / "resumed")
    undisturbed, resumed = (tmp_path / name / "model.safetensors" for name in ("undisturbed", "resumed"))
    assert undisturbed.read_bytes() == resumed.read_bytes()


def test_a_draft_belongs_to_the_target_it_was_trained_for(stories_dir: Path, tmp_path: Path) -> None:
    train(stories_dir, tmp_path, DraftRecipe(**{**TINY.__dict__, "steps": 3}))
    _, fingerprint = load_target(stories_dir)
    draft = load_draft(tmp_path)
    assert draft.draft.target_fingerprint == fingerprint
    assert draft.draft.tapped_layers == (4,)


def test_as_many_layers_as_the_target_are_refused(stories_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="layers is 5: a draft of a target of 5 layers has 1 to 4"):
        train(stories_dir, tmp_path, DraftRecipe(layers=5))


def test_a_target_without_tokenizer_is_refused(stories_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((stories_dir / name).read_bytes())
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        train(bare, tmp_path / "out")


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "vanilla"},
        {"init": "random"},
        {"loss": "data"},
        {"omega": 1.0},
        {"feedback": False},
        {"feedback": False, "activations": False},
        {"window": 64},
        {"copied_layers": (0, 3), "freeze_embeddings": True, "optimizer": "adamw", "self_key": False},
    ],
    ids=str,
)
def test_every_baseline_and_ablation_is_a_value_of_the_same_recipe(
    stories_dir: Path, tmp_path: Path, given: dict[str, object]
) -> None:
    short = {"steps": 3, "tokens_per_step": 64, "short_length": 16, "long_length": 32}
    recipe = recipe_for(stories_dir, short | given)
    train(stories_dir, tmp_path, recipe)
    draft = load_draft(tmp_path)
    assert draft.draft.kind == given.get("kind", "spire")
    assert bool(draft.draft.tapped_layers) == recipe.activations
    assert draft.draft.feedback == recipe.feedback
    assert draft.config.num_hidden_layers == 2


def test_a_vanilla_draft_has_an_eighth_of_the_targets_body(stories_dir: Path) -> None:
    target, identity = load_target(stories_dir)
    target.config = target.config.model_copy(update={"num_hidden_layers": 8})
    vanilla = new_draft(target, identity, recipe_for(stories_dir, {"kind": "vanilla", "layers": 4}))
    layer, narrow = (sum(p.numel() for p in model.layers[0].parameters() if p.ndim == 2) for model in (target, vanilla))
    assert layer * 8 == 8 * narrow * 4


def test_unknown_choices_are_refused_with_the_known_ones(stories_dir: Path) -> None:
    with pytest.raises(DataError, match="loss is 'hard': it is one of mixed, mixed-log, data"):
        recipe_for(stories_dir, {"loss": "hard"})
