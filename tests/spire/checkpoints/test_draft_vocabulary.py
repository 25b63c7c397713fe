"""A draft for a large vocabulary: it stores only its own layers, the tokens it can propose, and which target is its."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spire.checkpoints.weights import load_draft, load_embeddings, load_target, sampled_hash, save_draft
from spire.errors import CheckpointError
from spire.model.config import DraftConfig, SharedEmbeddings
from spire.model.draft import Draft, prune
from tests.untrained import untrained_draft

OWN = 64
SCALE = 2.5


@pytest.fixture(scope="module")
def made(stories_dir: Path) -> Draft:
    """A draft of every fifth token, whose embeddings are its target's."""
    target, fingerprint = load_target(stories_dir)
    shared = SharedEmbeddings(scale=SCALE, fingerprint=sampled_hash(load_embeddings(stories_dir)))
    kind = DraftConfig(target_fingerprint=fingerprint, tapped_layers=(4,), vocabulary=OWN, embeddings=shared)
    draft = prune(target, kind, (4,), torch.arange(0, 5 * OWN, 5))
    draft.embed_tokens.weight.data.mul_(SCALE)
    return draft


@pytest.fixture
def directory(made: Draft, tmp_path: Path) -> Path:
    save_draft(tmp_path / "draft", made, torch.float32)
    return tmp_path / "draft"


def rewrite(directory: Path, **tensors: torch.Tensor) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | {f"model.{name}": tensor for name, tensor in tensors.items()}, file)


def test_a_draft_that_shares_embeddings_stores_none_and_loads_as_it_was(
    made: Draft, directory: Path, stories_dir: Path
) -> None:
    stored = load_file(directory / "model.safetensors")
    assert not any("embed_tokens" in name or "lm_head" in name for name in stored)
    loaded = load_draft(directory, target=stories_dir)
    assert loaded.draft == made.draft
    for name, tensor in made.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor)


def test_a_draft_without_embeddings_asks_for_its_target(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no embeddings of its own.*give the target's directory, too"):
        load_draft(directory)


def test_embeddings_of_another_target_are_refused(directory: Path, stories_dir: Path, tmp_path: Path) -> None:
    other = shutil.copytree(stories_dir, tmp_path / "other")
    rewrite(other, **{"embed_tokens.weight": load_embeddings(other)["embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"is not the target that .* was trained for"):
        load_draft(directory, target=other)


def test_a_target_without_embedding_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.embed_tokens\.weight'"):
        load_draft(directory, target=directory)


@pytest.mark.parametrize(
    "vocabulary_W",
    [torch.arange(OWN).flip(0), torch.zeros(OWN).long(), torch.arange(OWN) + 500, torch.arange(OWN) - 1],
    ids=["descending", "the same token", "beyond the vocabulary", "negative"],
)
def test_a_vocabulary_that_is_none_is_refused(vocabulary_W: torch.Tensor, directory: Path, stories_dir: Path) -> None:
    rewrite(directory, vocabulary=vocabulary_W)
    with pytest.raises(CheckpointError, match="'vocabulary' does not list tokens below 512 in ascending order"):
        load_draft(directory, target=stories_dir)


def test_more_tokens_than_the_target_has_are_refused(stories_dir: Path, tmp_path: Path) -> None:
    draft = untrained_draft(stories_dir, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    config["spire_draft"]["vocabulary"] = 1024
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="proposes 1024 tokens of 512"):
        load_draft(draft)


@torch.inference_mode()
def test_tokens_that_a_draft_cannot_propose_have_no_probability(made: Draft) -> None:
    hidden_RD = torch.randn(3, made.config.hidden_size)
    q_RV = made.unembed(hidden_RD).softmax(dim=-1)
    proposed_V = torch.zeros(made.config.vocab_size, dtype=torch.bool)
    proposed_V[::5][:OWN] = True
    assert not q_RV[:, ~proposed_V].any()
    expected_RW = (hidden_RD @ made.lm_head.weight.T).softmax(dim=-1)
    torch.testing.assert_close(q_RV[:, proposed_V], expected_RW)
