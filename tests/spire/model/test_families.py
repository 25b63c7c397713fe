"""The keys of `config.json`: each that transformers writes has a place, and what is not built is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from spire.errors import CheckpointError
from spire.model.config import ModelConfig, load_model_config, unknown_keys
from spire.model.families import FAMILIES
from tests.spire.model.published_configs import LLAMA3, PUBLISHED

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
each_family = pytest.mark.parametrize("kind", CONFIGS)


def config_of(directory: Path, **values: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(SHAPE | values))
    return load_model_config(directory)


def of_family(kind: str) -> dict[str, Any]:
    """What a `config.json` says of its family."""
    return {"model_type": kind, "architectures": list(FAMILIES[kind].architectures)}


def refusal(directory: Path, **values: Any) -> str:
    with pytest.raises(CheckpointError) as refused:
        config_of(directory, **values)
    words = str(refused.value)
    assert str(directory / "config.json") in words
    assert "\n" not in words
    return words


def test_the_families_here_are_all_that_are_served() -> None:
    assert CONFIGS.keys() == FAMILIES.keys()


@each_family
def test_every_key_of_transformers_is_read_or_harmless_or_refused(kind: str) -> None:
    family, theirs = FAMILIES[kind], CONFIGS[kind]
    written = theirs().to_dict().keys() | {field.name for field in fields(theirs)}
    assert written - family.read - family.harmless - family.neutral.keys() == set()


def test_a_key_has_one_place() -> None:
    for family in FAMILIES.values():
        assert not family.read & family.harmless
        assert not (family.read | family.harmless) & family.neutral.keys()
        assert family.defaults.keys() <= family.read


@each_family
def test_what_transformers_writes_unasked_is_taken(kind: str, tmp_path: Path) -> None:
    theirs = CONFIGS[kind](**SHAPE | of_family(kind) | {"num_key_value_heads": 2})
    theirs.save_pretrained(tmp_path)
    assert load_model_config(tmp_path).vocab_size == 97
    (tmp_path / "config.json").write_text(json.dumps(theirs.to_dict()))
    assert load_model_config(tmp_path).vocab_size == 97
    assert unknown_keys(tmp_path) == []


@each_family
def test_what_config_json_leaves_out_is_what_transformers_takes(kind: str, tmp_path: Path) -> None:
    said = SHAPE | of_family(kind) | {"num_attention_heads": 32, "hidden_size": 64}
    ours, theirs = config_of(tmp_path, **said), CONFIGS[kind](**said)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == getattr(theirs, "head_dim", 64 // 32)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]


@each_family
def test_what_we_write_of_a_model_reads_as_the_same_model(kind: str, tmp_path: Path) -> None:
    for more in [{}, *([{"sliding_window": 100}, {"sliding_window": None}] if kind == "mistral" else [])]:
        config = config_of(tmp_path, **of_family(kind), num_key_value_heads=2, eos_token_id=[2, 3], **more)
        assert config.model_type == kind
        (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
        assert load_model_config(tmp_path) == config
        assert unknown_keys(tmp_path) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_models_are_published_with_is_taken_and_known(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, **PUBLISHED[name])
    assert config.torch_dtype == PUBLISHED[name].get("torch_dtype", "float32")
    assert config.rope.rope_theta == PUBLISHED[name].get("rope_theta", 10000.0)
    assert unknown_keys(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "qkv_bias", "qk_norm", "head_dim", "longest"),
    [
        ("Llama 3.1", False, False, 128, 131072),
        ("Qwen2.5-0.5B", True, False, 64, 32768),
        ("Qwen3-0.6B", False, True, 128, 40960),
        ("Mistral-7B-v0.1", False, False, 128, 4096),
        ("Mistral-Nemo", False, False, 128, 131072),
    ],
)
def test_a_family_sets_the_options_of_its_layer(
    name: str, qkv_bias: bool, qk_norm: bool, head_dim: int, longest: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, **PUBLISHED[name])
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (qkv_bias, qk_norm, head_dim)
    assert config.longest == longest


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": None}, None),
        ({}, 4096),
        ({"sliding_window": 4096, "max_position_embeddings": 1000}, 4096),
    ],
)
def test_a_mistral_s_window_is_read_and_null_is_none(
    values: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, **of_family("mistral"), num_key_value_heads=2, **values)
    assert config.sliding_window == window == MistralConfig(**values).sliding_window
    assert config.longest == min(config.max_position_embeddings, window or 2**40)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_qwen_s_window_counts_only_where_it_is_used(kind: str, tmp_path: Path) -> None:
    said = of_family(kind) | {"num_key_value_heads": 2, "sliding_window": 100, "max_window_layers": 1}
    assert config_of(tmp_path, **said).longest == 32768
    assert config_of(tmp_path, **said, use_sliding_window=False).longest == 32768
    assert "use_sliding_window is True" in refusal(tmp_path, **said, use_sliding_window=True)
    assert "layer_types" in refusal(tmp_path, **said, layer_types=["full_attention", "sliding_attention"])


def test_the_biases_of_a_qwen2_are_there_whatever_its_config_says(tmp_path: Path) -> None:
    for said in ({}, {"attention_bias": True}, {"attention_bias": False}):
        config = config_of(tmp_path, **of_family("qwen2"), num_key_value_heads=2, **said)
        assert (config.qkv_bias, config.attention_bias) == (True, False)


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
        ({"model_type": "gemma3"}, "'gemma3'; served are 'llama', 'mistral', 'qwen2', 'qwen3'"),
        ({"model_type": "qwen3"}, "'LlamaForCausalLM'; served is 'Qwen3ForCausalLM'"),
        (of_family("mistral") | {"attention_bias": True, "num_key_value_heads": 2}, "attention_bias is True"),
        (of_family("mistral") | {"sliding_window": 0, "num_key_value_heads": 2}, "sliding_window is 0"),
        (of_family("qwen3") | {"mlp_bias": True, "num_key_value_heads": 2}, "mlp_bias is True"),
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
    assert list(json.loads(config_of(tmp_path, eos_token_id=[2, 3]).identity)) == [
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


def test_models_of_two_families_have_two_identities(tmp_path: Path) -> None:
    """Else a draft of one would be taken for the other's."""
    same = {"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 100, "attention_bias": False}
    configs = [config_of(tmp_path, **of_family(kind), **same) for kind in FAMILIES]
    shorter = config_of(tmp_path, **of_family("mistral"), **same, sliding_window=50)
    assert len({config.identity for config in (*configs, shorter)}) == len(FAMILIES) + 1
