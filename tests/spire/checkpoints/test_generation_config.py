"""`generation_config.json`: what ends a text is sure or refused; a suggestion that cannot be told is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from spire.checkpoints.generation import Generation, SuggestedSampling, read_generation
from spire.checkpoints.weights import load_target
from spire.errors import CheckpointError
from spire.model.config import load_model_config
from tests.spire.checkpoints.test_checkpoint import config_of
from tests.spire.model.test_families import SHAPE
from tests.spire.model.test_target import reference_model
from tests.system.test_garbage import JSON


def generation_of(directory: Path, **said: Any) -> Generation:
    (directory / "config.json").write_text(json.dumps(SHAPE | {"eos_token_id": 2}))
    (directory / "generation_config.json").write_text(json.dumps(said))
    return read_generation(directory, load_model_config(directory))


@pytest.mark.parametrize(
    ("in_config", "said", "ends"),
    [
        (2, {"eos_token_id": [2, 9]}, (2, 9)),
        (2, {"eos_token_id": 9}, (2, 9)),
        (None, {"eos_token_id": [9, 2]}, (9, 2)),
        ([2, 7], {"temperature": 0.5}, (2, 7)),
        (2, {"eos_token_id": None}, (2,)),
        (2, None, (2,)),
    ],
)
def test_end_tokens_are_those_of_both_files(in_config: Any, said: Any, ends: tuple[int, ...], tmp_path: Path) -> None:
    config = config_of(tmp_path, eos_token_id=in_config)
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_generation(tmp_path, config).end_tokens == ends


def test_end_tokens_of_generation_config_change_no_fingerprint(tmp_path: Path) -> None:
    reference_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    alone = load_target(tmp_path)[1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.3}))
    assert load_target(tmp_path)[1] == alone


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_k", -1), ("top_k", 50.0), ("top_p", 1.5), ("temperature", "hot"), ("max_new_tokens", 0), ("do_sample", 1)],
)
def test_a_suggestion_that_cannot_be_told_is_left_out_and_named(key: str, value: Any, tmp_path: Path) -> None:
    """Each ended the start, though none is ever applied."""
    found = generation_of(tmp_path, **({"min_p": 0.1, "eos_token_id": [3]} | {key: value}))
    assert found.sampling == SuggestedSampling(min_p=0.1)
    assert found.end_tokens == (2, 3)
    assert found.unusable.startswith(f"{key} is {value!r}: ")
    assert "\n" not in found.unusable


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON)
def test_no_suggestion_ends_a_start(tmp_path: Path, value: Any) -> None:
    for key in SuggestedSampling.model_fields:
        found = generation_of(tmp_path, **{key: value})
        assert bool(found.unusable) == (value is not None and getattr(found.sampling, key) is None)


@pytest.mark.parametrize("none", [None, -1, [], [-1]])
def test_no_further_end_token_is_said_in_several_ways(none: Any, tmp_path: Path) -> None:
    assert generation_of(tmp_path, eos_token_id=none) == ((2,), SuggestedSampling(), "")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (97, "97"),
        (-2, "-2"),
        ([3, 97], "97"),
        ([True], "True"),
        ("</s>", "'</s>'"),
        (2.0, "2.0"),
        ({"id": 2}, "{'id': 2}"),
    ],
)
def test_an_end_token_outside_of_the_vocabulary_is_refused_with_its_value(
    said: Any, named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        generation_of(tmp_path, eos_token_id=said)
    file = tmp_path / "generation_config.json"
    assert str(refused.value) == f"{file}: eos_token_id {named} is no token of a vocabulary of 97"


def test_a_generation_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json.* no JSON object"):
        read_generation(tmp_path, config)
