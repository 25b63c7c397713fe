"""The target against `transformers`: the same logits on every kind of checkpoint that we say we serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spire.checkpoints.weights import load_target, save_target
from spire.errors import CheckpointError
from spire.model.config import model_config_of
from spire.model.families import FAMILIES
from spire.model.layers import Attention
from spire.model.target import Target, WholeSequence

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head for all": {"num_key_value_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "large rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "narrow heads": {"head_dim": 4},
    "heads wider than the model": {"head_dim": 64, "num_key_value_heads": 2},
    "attention bias": {"attention_bias": True, "num_key_value_heads": 2},
    "mlp bias": {"mlp_bias": True},
    "all at once": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "head_dim": 24,
        "attention_bias": True,
        "rope_parameters": LLAMA3,
        "rms_norm_eps": 1e-3,
    },
    "Mistral": {"model_type": "mistral", "sliding_window": None},
    "Mistral, up to its window": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 70},
    "Qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "Qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 24},
    "Qwen3, with biases": {"model_type": "qwen3", "head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-3},
}


def reference_model(model_type: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A small random model. Weights are large enough that every part of the arithmetic shows in the logits."""
    shape = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(shape | changes))).eval()
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.2)
    return model


@torch.no_grad()
def our_logits(directory: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    target, _ = load_target(directory)
    return target.unembed(target(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD)


def random_tokens(length: int = 70) -> torch.Tensor:
    return torch.randint(0, 97, (3, length), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = reference_model(**KINDS[kind])
    reference.save_pretrained(tmp_path)
    theirs = reference(random_tokens()).logits
    assert theirs.std() > 0.5, "the comparison must be about logits that differ"
    assert (our_logits(tmp_path, random_tokens()) - theirs).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen3, with biases"])
def test_without_a_family_s_option_logits_are_others(kind: str, tmp_path: Path) -> None:
    """A control: each option shows in the logits, or the comparison above would prove little."""
    reference = reference_model(**KINDS[kind])
    reference.save_pretrained(tmp_path)
    theirs = reference(random_tokens()).logits
    for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
        target, _ = load_target(tmp_path)
        if without(target, part):
            ours = target.unembed(target(random_tokens(), WholeSequence(random_tokens())).hidden_BTD)
            assert (ours - theirs).abs().max() > 1e-2, part


def without(target: Target, part: str) -> bool:
    """Drop the bias, or the norm, of one part of the first layer. False if it has none."""
    attention = target.layers[0].self_attn
    assert isinstance(attention, Attention)
    module = getattr(attention, part)
    if isinstance(module, nn.RMSNorm):
        setattr(attention, part, nn.Identity())
    elif isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()
    else:
        return False
    return True


@pytest.mark.parametrize(("kind", "option"), [("Qwen2", "qkv_bias"), ("Qwen3", "qk_norm")])
def test_a_table_without_the_option_does_not_load_the_family(
    kind: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference_model(**KINDS[kind]).save_pretrained(tmp_path)
    model_type = KINDS[kind]["model_type"]
    monkeypatch.setitem(FAMILIES, model_type, FAMILIES[model_type]._replace(**{option: False}))
    with pytest.raises(CheckpointError, match="tensors are not this model's"):
        load_target(tmp_path)


@torch.no_grad()
def test_beyond_its_window_a_mistral_has_logits_that_are_not_ours(tmp_path: Path) -> None:
    """Why contexts end at the window: up to there both agree, and from there on they do not."""
    reference = reference_model("mistral", sliding_window=40)
    reference.save_pretrained(tmp_path)
    far_BT = (our_logits(tmp_path, random_tokens()) - reference(random_tokens()).logits).abs().amax(dim=-1)
    assert far_BT[:, :40].max() < 1e-4
    assert far_BT[:, 40:].max() > 1e-2
    assert load_target(tmp_path)[0].config.longest == 40


@torch.no_grad()
def test_rope_kinds_give_different_logits(tmp_path: Path) -> None:
    """A control: were the scaling ignored on both sides, the tests above would still pass."""
    logits = {}
    for kind in ("plain", "linear rope", "llama3 rope", "large rope base"):
        reference_model(**KINDS[kind]).save_pretrained(tmp_path / kind)
        logits[kind] = our_logits(tmp_path / kind, random_tokens())
    plain = logits.pop("plain")
    assert all((other - plain).abs().max() > 1e-2 for other in logits.values())


@torch.no_grad()
def test_sharded_weights_load(tmp_path: Path) -> None:
    reference = reference_model()
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert (our_logits(tmp_path, random_tokens()) - reference(random_tokens()).logits).abs().max() < 1e-4


def test_sharding_does_not_change_the_fingerprint_and_other_weights_do(tmp_path: Path) -> None:
    reference_model().save_pretrained(tmp_path / "whole")
    reference_model().save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    reference_model(seed=1).save_pretrained(tmp_path / "other")
    whole, sharded, other = (load_target(tmp_path / name)[1] for name in ("whole", "sharded", "other"))
    assert whole == sharded != other


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_we_save_opens_in_transformers_with_the_same_logits(model_type: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = model_config_of(
        {
            "model_type": model_type,
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": tied,
            "rope_parameters": LLAMA3,
            "eos_token_id": [1, 5],
        }
    )
    target = Target(config).eval()
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_target(tmp_path, target, torch.float32)
    kind = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, **kind).eval()
    assert reference.config.model_type == model_type
    tokens = random_tokens()
    ours = target.unembed(target(tokens, WholeSequence(tokens)).hidden_BTD)
    assert (ours - reference(tokens).logits).abs().max() < 1e-4
    assert (our_logits(tmp_path, tokens) - ours).abs().max() < 1e-6
    assert reference.config.eos_token_id == [1, 5]


@torch.no_grad()
def test_taps_are_the_activations_that_enter_the_layers(tmp_path: Path) -> None:
    reference = reference_model()
    reference.save_pretrained(tmp_path)
    entering = reference(random_tokens(), output_hidden_states=True).hidden_states
    target, _ = load_target(tmp_path)
    taps_BTND = target(random_tokens(), WholeSequence(random_tokens()), tapped_layers=(0, 1, 2)).taps_BTND
    assert taps_BTND is not None
    for layer in range(3):
        assert (taps_BTND[:, :, layer] - entering[layer]).abs().max() < 1e-4
