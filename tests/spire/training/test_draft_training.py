"""Training a draft: resumes to the same weights, belongs to its target, refuses what it cannot do."""

from __future__ import annotations

import json
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import spire.training.draft
import spire.training.run
from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import load_draft, load_target, save_target
from spire.errors import CheckpointError, DataError
from spire.model.config import ModelConfig, RopeConfig, load_model_config
from spire.model.target import Target
from spire.perf.shapes import DraftKind, Shape, trained_draft
from spire.training.corpus import TokenStream
from spire.training.draft import DraftRecipe, new_draft, recipe_for, rollout_loss, train_draft
from spire.training.evaluation import token_losses
from spire.training.on_policy import OnPolicy
from spire.training.run import Execution, StepResult, predict
from tests.conftest import FIXTURES
from tests.marks import thoroughly

TEXT = FIXTURES / "text" / "jowett_charmides.txt"
TINY = DraftRecipe(steps=230, tokens_per_step=64, short_length=16, long_length=32, layers=1, window=8)


class _Killed(Exception):
    pass


def train(target: Path, out: Path, recipe: DraftRecipe = TINY, data: Path = TEXT) -> None:
    train_draft(target, [data], [], out, recipe, Execution(compiled=False))


@pytest.mark.thorough
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
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
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
        {"vocabulary": 64, "freeze_embeddings": True, "optimizer": "adamw"},
        {"vocabulary": 64, "loss": "data"},
        thoroughly({"on_policy": 0.5, "loss": "mixed-log", "omega_final": 0.0}),
    ],
    ids=str,
)
def test_every_baseline_and_ablation_is_a_value_of_the_same_recipe(
    stories_dir: Path, tmp_path: Path, given: dict[str, object]
) -> None:
    short = {"steps": 3, "tokens_per_step": 64, "short_length": 16, "long_length": 32, "layers": 2}
    recipe = recipe_for(stories_dir, short | given)
    train(stories_dir, tmp_path, recipe)
    draft = load_draft(tmp_path, target=stories_dir)
    assert draft.draft.kind == given.get("kind", "spire")
    assert bool(draft.draft.tapped_layers) == recipe.activations
    assert draft.draft.feedback == recipe.feedback
    assert draft.config.num_hidden_layers == 2
    assert draft.lm_head.out_features == given.get("vocabulary", 512)


def test_a_draft_learns_from_chats_what_its_target_computed_once(stories_chat_dir: Path, tmp_path: Path) -> None:
    """Its loss falls, it proposes tokens of the answers and the end token, and it stores its layers alone."""
    answers = ["Once upon a time, there was a cat.", "The dog was happy.", "She had a big red ball."]
    chats = [[{"role": "user", "content": "Go on"}, {"role": "assistant", "content": text}] for text in answers]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats * 8))
    given = {"steps": 60, "tokens_per_step": 256, "layers": 2, "vocabulary": 64, "freeze_embeddings": True}
    recipe = recipe_for(stories_chat_dir, given | {"short_length": 32})
    train(stories_chat_dir, tmp_path / "draft", recipe, data)
    losses = [json.loads(line).get("loss") for line in (tmp_path / "draft" / "run" / "log.jsonl").open()]
    of_steps = [loss for loss in losses if loss is not None]
    assert of_steps[-1] < of_steps[0] - 0.2
    draft = load_draft(tmp_path / "draft", target=stories_chat_dir)
    assert draft.vocabulary is not None
    proposed = load_tokenizer(stories_chat_dir, 512).decode(draft.vocabulary.tolist())
    assert "happy" in proposed
    assert 2 in draft.vocabulary.tolist(), "the end token"
    assert not any("embed" in name or "lm_head" in name for name in load_file(tmp_path / "draft" / "model.safetensors"))


def test_a_draft_trained_further_proposes_what_its_new_text_has_most(stories_dir: Path, tmp_path: Path) -> None:
    """As many tokens as the new run asks for."""
    given = {"steps": 1, "tokens_per_step": 64, "short_length": 16, "layers": 1, "vocabulary": 64}
    recipe = recipe_for(stories_dir, given | {"freeze_embeddings": True})
    train(stories_dir, tmp_path / "first", recipe)
    other = tmp_path / "other.txt"
    other.write_text("A quick brown fox jumps over the lazy dog. " * 100)
    more = replace(recipe, vocabulary=96)
    train(stories_dir, tmp_path / "second", replace(more, start_from=str(tmp_path / "first")), other)
    train(stories_dir, tmp_path / "afresh", more, other)
    first, second, afresh = (load_draft(tmp_path / n, target=stories_dir) for n in ("first", "second", "afresh"))
    assert all(draft.vocabulary is not None for draft in (first, second, afresh))
    assert torch.equal(second.vocabulary, afresh.vocabulary)
    assert (len(first.vocabulary), len(second.vocabulary), second.draft.vocabulary) == (64, 96, 96)
    assert torch.equal(second.lm_head.weight, afresh.lm_head.weight)


@pytest.mark.parametrize("kind", ["spire", "vanilla"])
@pytest.mark.parametrize("layers", [5, 8, 30])
def test_the_performance_model_counts_the_draft_that_training_makes(
    stories_dir: Path, tmp_path: Path, kind: DraftKind, layers: int
) -> None:
    config = load_model_config(stories_dir).model_copy(update={"num_hidden_layers": layers})
    save_target(tmp_path, Target(config))
    target, identity = load_target(tmp_path)
    made = new_draft(target, identity, recipe_for(tmp_path, {"kind": kind}))
    counted = trained_draft(kind, Shape.of(config))
    assert Shape.of(made.config) == counted.shape
    if kind == "spire":
        assert made.config.num_hidden_layers == {5: 1, 8: 2, 30: 8}[layers]
        assert (made.draft.window, made.draft.sink) == (counted.window, counted.sink)


def test_a_draft_that_is_trained_further_keeps_its_number_of_layers(stories_dir: Path, stories_draft_dir: Path) -> None:
    layers = load_model_config(stories_draft_dir).num_hidden_layers
    assert layers != recipe_for(stories_dir, {}).layers
    further = recipe_for(stories_dir, {"start_from": str(stories_draft_dir)})
    assert further.layers == layers
    assert further.copied_layers == load_draft(stories_draft_dir).draft.tapped_layers


def test_for_a_large_vocabulary_layers_are_spread_from_the_first(stories_dir: Path, tmp_path: Path) -> None:
    config = json.loads((stories_dir / "config.json").read_text()) | {"vocab_size": 32000, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert recipe_for(tmp_path, {"layers": 3}).copied_layers == (0, 14, 29)
    assert recipe_for(tmp_path, {"layers": 1}).copied_layers == (0,)
    assert recipe_for(tmp_path, {"layers": 3, "copied_layers": (27, 28, 29)}).copied_layers == (27, 28, 29)
    with pytest.raises(DataError, match="a draft of a target of 30 layers has 1 to 29"):
        recipe_for(tmp_path, {"layers": 30})


def test_a_vanilla_draft_has_an_eighth_of_the_targets_body(stories_dir: Path) -> None:
    target, identity = load_target(stories_dir)
    target.config = target.config.model_copy(update={"num_hidden_layers": 8})
    vanilla = new_draft(target, identity, recipe_for(stories_dir, {"kind": "vanilla", "layers": 4}))
    layer, narrow = (sum(p.numel() for p in model.layers[0].parameters() if p.ndim == 2) for model in (target, vanilla))
    assert layer * 8 == 8 * narrow * 4


def test_unknown_choices_are_refused_with_the_known_ones(stories_dir: Path) -> None:
    with pytest.raises(DataError, match="loss is 'hard': it is one of mixed, mixed-log, data"):
        recipe_for(stories_dir, {"loss": "hard"})


def test_on_policy_rows_begin_as_the_corpus_and_go_on_as_the_target_would(stories_dir: Path) -> None:
    """The target's own continuations are far likelier under it than a corpus it was not trained on."""
    target, _ = load_target(stories_dir)
    stream = TokenStream(np.arange(3, 500, dtype=np.uint32), start_token=1)
    source = OnPolicy.build(target, "stories", stream, 1.0, 32, sequences=8)
    rows = source.batch(seed=1, step=2, batch=16, length=32)
    assert (rows == source.batch(seed=1, step=2, batch=16, length=32)).all()
    assert (np.diff(rows[:, 1:16]) == 1).all(), "the first half is the corpus, which counts upwards"
    assert not (np.diff(rows[:, 16:]) == 1).all()
    losses = token_losses(target, rows[0].tolist())
    assert losses[16:].mean() < losses[:15].mean()
    assert (source.batch(seed=1, step=2, batch=16, length=20) == stream.batch(1, 2, 16, 20)).all()
    assert OnPolicy(stream, source.written_NL, 0.0).batch(1, 2, 4, 32).tolist() == stream.batch(1, 2, 4, 32).tolist()


@pytest.mark.thorough
def test_tau_is_logged_against_training_tokens_and_agrees_with_alpha(stories_dir: Path, tmp_path: Path) -> None:
    train_draft(stories_dir, [TEXT], [TEXT], tmp_path, TINY, Execution(compiled=False))
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (figures,) = [line for line in lines if "valid_tau" in line]
    alpha, tau = figures["valid_alpha"], figures["valid_tau"]
    assert figures["tokens"] == 200 * 64
    assert 1 + alpha <= tau + 0.05
    assert tau <= 5


def test_time_and_memory_are_said_before_the_first_step(
    stories_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(stories_dir, tmp_path, replace(TINY, steps=3))
    said = capfd.readouterr().err
    assert re.search(r"draft: 3 steps, about \d+ min, \d\.\d GB of memory", said)


def test_a_prediction_is_the_time_that_its_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    clock = [0.0]
    monkeypatch.setattr(spire.training.run.time, "perf_counter", lambda: clock[0])

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def forward(step: int) -> StepResult:
        clock[0] += 0.03 if step % 4 == 1 else 0.01
        return StepResult(model(torch.ones(1)).sum(), {}, 1)

    lengths = [2048 if step % 4 == 1 else 512 for step in range(8, 108)]
    seconds, _ = predict(lengths, 8, forward, model, [optimizer])
    assert seconds == pytest.approx(25 * 0.03 + 75 * 0.01)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.thorough
def test_a_disk_that_is_full_is_named_and_the_last_checkpoint_stands(stories_dir: Path, tmp_path: Path) -> None:
    """The process may write no file larger than the checkpoint of 200 steps already is, less a byte."""
    train(stories_dir, tmp_path, replace(TINY, steps=200))
    checkpoint = tmp_path / "run" / "state.safetensors"
    before = checkpoint.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, limit[1]))
    try:
        with pytest.raises(DataError, match=r"state\.safetensors cannot be written .* is the disk full\?"):
            train(stories_dir, tmp_path, replace(TINY, steps=400))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert checkpoint.read_bytes() == before
    assert [file.name for file in checkpoint.parent.glob("*.part*")] == []


def test_a_run_cut_into_slices_of_time_gives_the_same_weights(stories_dir: Path, tmp_path: Path) -> None:
    recipe = replace(TINY, steps=4)
    train(stories_dir, tmp_path / "whole", recipe)
    slices = Execution(compiled=False, minutes=0)
    done = [train_draft(stories_dir, [TEXT], [], tmp_path / "sliced", recipe, slices) for _ in range(4)]
    assert done == [False, False, False, True]
    whole, sliced = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "sliced"))
    assert whole == sliced


def test_a_draft_is_not_trained_on_with_other_data(stories_dir: Path, tmp_path: Path) -> None:
    train(stories_dir, tmp_path / "draft", replace(TINY, steps=1))
    (tmp_path / "other.txt").write_text(TEXT.read_text() * 2)
    with pytest.raises(DataError, match="was made with data = "):
        train(stories_dir, tmp_path / "draft", replace(TINY, steps=2), tmp_path / "other.txt")


def test_a_finished_draft_is_trained_further_from_where_it_stands(stories_dir: Path, tmp_path: Path) -> None:
    train(stories_dir, tmp_path / "first", replace(TINY, steps=30))
    further = replace(TINY, steps=1, muon_rate=0.0, adamw_rate=0.0, start_from=str(tmp_path / "first"))
    train(stories_dir, tmp_path / "second", further)
    first, second = (load_draft(tmp_path / name) for name in ("first", "second"))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_a_draft_of_another_shape_is_not_trained_further(stories_dir: Path, tmp_path: Path) -> None:
    train(stories_dir, tmp_path / "first", replace(TINY, steps=1))
    further = replace(TINY, window=5, start_from=str(tmp_path / "first"))
    with pytest.raises(DataError, match=rf"first has window = {TINY.window}, this run asks for 5"):
        train(stories_dir, tmp_path / "second", further)


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [("llama", True), ("llama", False), thoroughly("mistral", False), ("qwen2", True), ("qwen3", False)],
)
@pytest.mark.parametrize("kind", ["spire", "vanilla"])
def test_any_served_shape_gets_a_draft_from_json_lines(
    stories_dir: Path, tmp_path: Path, model_type: str, tied: bool, kind: str
) -> None:
    """Grouped queries, tied embeddings, rope scaling, bias, norms of queries; text as JSONL."""
    config = ModelConfig(
        model_type=model_type,
        vocab_size=512,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_bias=model_type == "llama",
        sliding_window=24 if model_type == "mistral" else None,
        rope=RopeConfig(rope_type="linear", factor=2.0),
    )
    directory = tmp_path / "target"
    save_target(directory, Target(config), torch.float32)
    shutil.copy(stories_dir / "tokenizer.json", directory)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.read_text().split("\n\n")[:40]))
    short = {"steps": 3, "tokens_per_step": 64, "short_length": 16, "long_length": 32}
    train(directory, tmp_path / "draft", recipe_for(directory, short | {"kind": kind}), text)
    draft = load_draft(tmp_path / "draft")
    assert draft.draft.target_fingerprint == load_target(directory)[1]
    assert (draft.config.num_key_value_heads, draft.config.model_type) == (2, model_type)


def test_a_tokenizer_that_knows_more_tokens_than_the_target_is_refused(stories_dir: Path, tmp_path: Path) -> None:
    """The target's directory was given another's tokenizer."""
    directory = shutil.copytree(stories_dir, tmp_path / "target")
    other = Tokenizer(WordLevel({f"w{i}": i for i in range(600)}, unk_token="w0"))
    other.save(str(directory / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer has 600 tokens, the model's vocab_size is 512"):
        train(directory, tmp_path / "out")


def test_too_little_text_is_refused_with_its_length(stories_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time.")
    with pytest.raises(DataError, match=r"the corpus holds \d+ tokens, fewer than one sequence of 16"):
        train(stories_dir, tmp_path / "out", data=text)


def test_a_width_that_cannot_be_halved_has_no_vanilla_draft(stories_dir: Path) -> None:
    target, identity = load_target(stories_dir)
    target.config = target.config.model_copy(update={"intermediate_size": 171})
    with pytest.raises(DataError, match=r"MLP 171 .* cannot all be halved"):
        new_draft(target, identity, recipe_for(stories_dir, {"kind": "vanilla"}))
