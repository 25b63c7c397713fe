"""The keys of `config.json`: each that transformers writes has a place, and what is not built is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from spire.errors import CheckpointError
from spire.model.config import ModelConfig, load_model_config, unknown_keys
from spire.model.families import FAMILIES

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(directory: Path, **values: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(SHAPE | values))
    return load_model_config(directory)


def refusal(directory: Path, **values: Any) -> str:
    with pytest.raises(CheckpointError) as refused:
        config_of(directory, **values)
    words = str(refused.value)
    assert str(directory / "config.json") in words
    assert "\n" not in words
    return words


def test_every_llama_key_of_transformers_is_read_or_harmless_or_refused() -> None:
    family = FAMILIES["llama"]
    written = LlamaConfig().to_dict().keys() | {field.name for field in fields(LlamaConfig)}
    assert written - family.read - family.harmless - family.neutral.keys() == set()


def test_a_key_has_one_place() -> None:
    for family in FAMILIES.values():
        assert not family.read & family.harmless
        assert not (family.read | family.harmless) & family.neutral.keys()


def test_what_transformers_writes_unasked_is_taken(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    assert load_model_config(tmp_path).vocab_size == 97
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig(**SHAPE).to_dict()))
    assert load_model_config(tmp_path).vocab_size == 97
    assert unknown_keys(tmp_path) == []


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1": {
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
        "pretraining_tp": 1,
    },
    "the first": {
        "architectures": ["LLaMAForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": -1,
        "max_sequence_length": 2048,
        "torch_dtype": "float16",
    },
    "linear": {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000, "rope_interleaved": False},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_llamas_are_published_with_is_taken_and_known(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, **PUBLISHED[name])
    assert config.torch_dtype == PUBLISHED[name].get("torch_dtype", "float32")
    assert config.rope.rope_theta == PUBLISHED[name].get("rope_theta", 10000.0)
    assert unknown_keys(tmp_path) == []


def test_keys_that_nobody_knows_are_told(tmp_path: Path) -> None:
    config_of(tmp_path, warp_factor=9, sliding_window=None)
    assert unknown_keys(tmp_path) == ["warp_factor"]


@pytest.mark.parametrize("key", sorted(FAMILIES["llama"].neutral))
def test_a_key_that_changes_numbers_is_refused_by_name_unless_neutral(key: str, tmp_path: Path) -> None:
    assert key in refusal(tmp_path, **{key: {"changes": "numbers"}})
    for value in FAMILIES["llama"].neutral[key]:
        assert config_of(tmp_path, **{key: value}) == config_of(tmp_path)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}, "auto_map"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "qwen2"}, "'qwen2'"),
        ({"model_type": None}, "model_type is None"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "needs low_freq_factor"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "needs factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'default', 'linear', 'llama3'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is 4.0"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}}, "different things"),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 4.0}}, "different things"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 5e5}}, "different things"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(tmp_path, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
        {"architectures": None},
        {"rope_scaling": {}, "rope_parameters": None},
        {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"rope_theta": 5e5, "beta_fast": None}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"pretraining_tp": 2},
    ],
)
def test_what_changes_no_number_is_taken(values: dict[str, Any], tmp_path: Path) -> None:
    assert config_of(tmp_path, **values).hidden_size == 48


def test_of_two_ropes_that_agree_either_may_carry_the_base(tmp_path: Path) -> None:
    based = LLAMA3 | {"rope_theta": 5e5}
    for values in (
        {"rope_parameters": based, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3, "rope_scaling": based},
    ):
        assert config_of(tmp_path, **values).rope == config_of(tmp_path, rope_scaling=LLAMA3, rope_theta=5e5).rope


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", True),
        ("num_attention_heads", -4),
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("num_attention_heads", 4.5),
        ("num_attention_heads", "4"),
        ("num_attention_heads", [4]),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("head_dim", 7),
        ("head_dim", 10**9),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("hidden_size", 10**9),
        ("hidden_size", 50),
        ("hidden_size", None),
        ("intermediate_size", 10**12),
        ("vocab_size", 10**10),
        ("vocab_size", None),
        ("max_position_embeddings", -1),
        ("max_position_embeddings", 10**15),
        ("rope_theta", math.inf),
        ("rope_theta", 0),
        ("rope_theta", -1e4),
        ("rope_theta", "1e4"),
        ("tie_word_embeddings", "no"),
        ("attention_bias", 1),
        ("eos_token_id", -1),
        ("eos_token_id", [2, True]),
        ("eos_token_id", 97),
        ("bos_token_id", {"id": 1}),
        ("torch_dtype", 16),
    ],
)
def test_a_number_that_no_model_has_is_named_with_its_key(key: str, value: Any, tmp_path: Path) -> None:
    assert key in refusal(tmp_path, **{key: value})


def test_sizes_that_are_each_possible_and_together_are_not_are_refused(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1000, "hidden_size": 1_000_000, "intermediate_size": 1_000_000, "head_dim": 128}
    assert "weights" in refusal(tmp_path, **sizes)


def test_the_identity_of_a_target_is_made_of_the_same_fields_as_ever(tmp_path: Path) -> None:
    """Drafts name their target by it: one more field, or another order, and every draft would be a stranger's."""
    written = config_of(tmp_path, eos_token_id=[2, 3]).model_dump_json(exclude={"torch_dtype"})
    assert list(json.loads(written)) == [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "rope",
        "bos_token_id",
        "eos_token_ids",
    ]
