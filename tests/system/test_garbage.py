"""Whatever JSON stands under a key of a checkpoint's files: it is read, or refused in one line that names the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from spire.checkpoints.chat_template import read_chat_template
from spire.checkpoints.generation import SuggestedSampling, read_generation
from spire.checkpoints.special_tokens import read_declared
from spire.errors import CheckpointError
from spire.model.config import load_draft_config, load_model_config, unknown_keys
from spire.model.families import FAMILIES
from tests.spire.model.published_configs import LLAMA3
from tests.spire.model.test_families import SHAPE, of_family

NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 10**9, 10**30, 1e308])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(["llama3", "<s>", "bfloat16"])
JSON = st.recursive(
    LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3)
)
ROPE = st.dictionaries(st.sampled_from([*LLAMA3, "type", "rope_theta", "beta_fast"]), JSON, max_size=6)
TOKEN = st.fixed_dictionaries({}, optional=dict.fromkeys(("content", "special", "lstrip", "__type"), JSON))
KEYS = [(kind, key) for kind, family in FAMILIES.items() for key in sorted({*family.read, *family.neutral})]
DECLARED = st.dictionaries(st.sampled_from(["5", "x", "-1", "99999999999999999999"]), TOKEN | JSON, max_size=3)


def read_or_refused(read: Callable[[], object], file: Path) -> None:
    words = ""
    try:
        read()
    except CheckpointError as error:
        words = str(error)
    assert not words or str(file) in words
    assert "\n" not in words
    assert not re.search(r"constrained|\[int|function-", words), "pydantic's own names"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KEYS), JSON)
def test_any_value_of_a_key_of_config_json(tmp_path: Path, kind_and_key: tuple[str, str], value: Any) -> None:
    file, (kind, key) = tmp_path / "config.json", kind_and_key
    file.write_text(json.dumps(SHAPE | of_family(kind) | {"num_key_value_heads": 2, key: value}))
    read_or_refused(lambda: (load_model_config(tmp_path), unknown_keys(tmp_path)), file)
    read_or_refused(lambda: load_draft_config(tmp_path), file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["rope_parameters", "rope_scaling"]), ROPE)
def test_any_rope(tmp_path: Path, key: str, section: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {key: LLAMA3 | section}))
    read_or_refused(lambda: load_model_config(tmp_path), tmp_path / "config.json")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["kind", "target_fingerprint", "tapped_layers", "window", "sink"]), JSON) | JSON)
@example({"a key\nof two lines": None})
def test_any_draft(tmp_path: Path, section: Any) -> None:
    plain = {"target_fingerprint": "x", "tapped_layers": [1]}
    draft = plain | section if isinstance(section, dict) else section
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"spire_draft": draft}))
    read_or_refused(lambda: load_draft_config(tmp_path), tmp_path / "config.json")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*SuggestedSampling.model_fields, "eos_token_id"]), JSON, max_size=3))
def test_any_generation_config(tmp_path: Path, said: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    config = load_model_config(tmp_path)
    read_or_refused(lambda: read_generation(tmp_path, config), tmp_path / "generation_config.json")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "bos_token": TOKEN | JSON,
            "image_token": TOKEN | JSON,
            "additional_special_tokens": st.lists(TOKEN | JSON, max_size=2) | JSON,
            "extra_special_tokens": TOKEN | JSON,
            "added_tokens_decoder": DECLARED | JSON,
            "tokenizer_class": JSON,
            "chat_template": JSON,
        },
    )
)
def test_any_declaration_of_tokens(tmp_path: Path, name: str, said: dict[str, Any]) -> None:
    (tmp_path / name).write_text(json.dumps(said))
    read_or_refused(lambda: read_declared(tmp_path, {}).in_order(), tmp_path)
    read_or_refused(lambda: read_chat_template(tmp_path), tmp_path)
    (tmp_path / name).unlink()
