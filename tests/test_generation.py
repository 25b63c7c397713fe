"""`generation_config.json`: end tokens beside those of `config.json`, suggested sampling, garbage refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spire.errors import CheckpointError
from spire.model.checkpoint import load_target
from spire.model.generation import read_generation
from tests.test_checkpoint import config_of
from tests.test_target import reference_model


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
    assert read_generation(tmp_path, config)[0] == ends


def test_end_tokens_of_generation_config_change_no_fingerprint(tmp_path: Path) -> None:
    reference_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    alone = load_target(tmp_path)[1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.3}))
    assert load_target(tmp_path)[1] == alone


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"eos_token_id": 97}, "eos_token_id 97"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": True}, "top_k"),
        ({"do_sample": "yes"}, "do_sample"),
        ([], "no JSON object"),
    ],
)
def test_a_generation_config_that_is_none_is_named_in_one_line(said: Any, named: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=named) as refused:
        read_generation(tmp_path, config)
    assert str(tmp_path / "generation_config.json") in str(refused.value)
    assert "\n" not in str(refused.value)
