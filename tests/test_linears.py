"""Packed weights: the same numbers, in bfloat16 bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import Draft, prune
from spire.model.packing import pack
from spire.model.target import Target, WholeSequence

packable = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 in this processor")


def target_of(dtype: torch.dtype, **changes: object) -> Target:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    target = Target(ModelConfig.model_validate({**sizes, **heads, **changes}))
    for parameter in target.parameters():
        nn.init.normal_(parameter, std=0.3)
    return target.to(dtype).requires_grad_(False)


def logits(target: Target, tokens_BT: torch.Tensor) -> torch.Tensor:
    return target.unembed(target(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD)


@packable
@pytest.mark.parametrize("rows", [1, 5, 80])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
@torch.no_grad()
def test_a_packed_targets_logits_are_the_same_bit_for_bit(rows: int, changes: dict[str, bool]) -> None:
    target, tokens_BT = target_of(torch.bfloat16, **changes), torch.arange(rows)[None] % 96
    before = logits(target, tokens_BT)
    assert torch.equal(logits(pack(target), tokens_BT), before)


@packable
@torch.no_grad()
def test_a_packed_draft_remembers_the_same() -> None:
    draft: Draft = prune(target_of(torch.bfloat16), DraftConfig(target_fingerprint="", tapped_layers=(1,)), (1,))
    taps_BTND, positions_BT = torch.randn(3, 7, 1, 64).bfloat16(), torch.arange(7).expand(3, 7)
    draft = draft.bfloat16().requires_grad_(False)
    before = draft.remembered(taps_BTND, positions_BT)
    for was, now in zip(before[0], pack(draft).remembered(taps_BTND, positions_BT)[0], strict=True):
        assert torch.equal(now, was)


@pytest.mark.parametrize("rows", [1, 5, 20, 80])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
@torch.no_grad()
def test_a_packed_targets_logits_in_float32_are_the_same_up_to_rounding(rows: int, changes: dict[str, bool]) -> None:
    target, tokens_BT = target_of(torch.float32, **changes), torch.arange(rows)[None] % 96
    before = logits(target, tokens_BT)
    torch.testing.assert_close(logits(pack(target), tokens_BT), before)
    assert all(module.weight is None for module in target.modules() if isinstance(module, nn.Linear))


@torch.no_grad()
def test_weights_of_other_types_stay_as_they_are() -> None:
    target = pack(target_of(torch.float64))
    assert all(module.weight is not None for module in target.modules() if isinstance(module, nn.Linear))
    assert logits(target, torch.arange(5)[None]).isfinite().all()
