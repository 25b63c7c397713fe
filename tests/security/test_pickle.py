"""Weights are safetensors: a pickle, which could run anything, is refused unopened, as a target and as a draft."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from spire.checkpoints.weights import load_draft, load_target
from spire.errors import CheckpointError
from tests.security.conftest import refused_start


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, sprung: Path):
        self.sprung = sprung

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.sprung),)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


def pickled(directory: Path, name: str, sprung: Path) -> Path:
    """A copy of a checkpoint in which a pickle takes the place of the weights."""
    copy = shutil.copytree(directory, sprung.parent / "pickled")
    (copy / "model.safetensors").unlink()
    (copy / name).write_bytes(pickle.dumps(Trap(sprung)))
    return copy


def test_the_trap_works(sprung: Path) -> None:
    """A control for the tests below."""
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()


@pytest.mark.fault(25)
def test_a_verifier_refuses_a_pickled_target(stories_dir: Path, sprung: Path) -> None:
    directory = pickled(stories_dir, "pytorch_model.bin", sprung)
    message = refused_start("verifier_service", "--model", str(directory), "--port", "0")
    assert f"{directory}/model.safetensors does not exist: pytorch_model.bin is not opened" in message
    assert "Save the model as safetensors" in message
    assert not sprung.exists()


@pytest.mark.thorough
@pytest.mark.fault(25)
def test_a_draft_service_refuses_a_pickled_draft(stories_draft_dir: Path, sprung: Path) -> None:
    directory = pickled(stories_draft_dir, "draft.pt", sprung)
    command = ["--draft", str(directory), "--verifier", "127.0.0.1:9", "--port", "0"]
    message = refused_start("draft_service", *command)
    assert f"{directory}/model.safetensors does not exist: draft.pt is not opened" in message
    assert not sprung.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model-00001-of-00001.bin"])
def test_a_pickle_under_the_name_of_weights_is_not_unpickled(name: str, stories_dir: Path, sprung: Path) -> None:
    directory = pickled(stories_dir, name, sprung)
    index = {"weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} cannot be read"):
        load_target(directory)
    assert not sprung.exists()


def test_weights_that_torch_saved_are_not_opened_either(stories_draft_dir: Path, sprung: Path) -> None:
    directory = pickled(stories_draft_dir, "draft.pt", sprung)
    torch.save({"weight": torch.zeros(2)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_draft(directory)
    assert not sprung.exists()
