"""Packing: kernels in the place of layers where they fit, torch where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spire.kernels import kernels_for
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.config import ModelConfig
from spire.model.target import Target, WholeSequence


def target_of(dtype: torch.dtype, **changes: object) -> Target:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    target = Target(ModelConfig.model_validate({**sizes, **heads, **changes}))
    for parameter in target.parameters():
        nn.init.normal_(parameter, std=0.3)
    return target.to(dtype).requires_grad_(False)


def logits(target: Target, tokens_BT: torch.Tensor) -> torch.Tensor:
    return target.unembed(target(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}, {"intermediate_size": 80}])
@torch.no_grad()
def test_a_model_that_no_kernel_fits_is_left_as_it_is(changes: dict[str, object]) -> None:
    target, tokens_BT = target_of(torch.float32, **changes), torch.arange(20)[None]
    before = logits(target, tokens_BT)
    assert torch.equal(logits(CpuBackend().pack(target), tokens_BT), before)
    assert all(isinstance(module.weight, torch.Tensor) for module in target.modules() if isinstance(module, nn.Linear))


@pytest.mark.skipif(kernels_for(torch.float32) is None, reason="no kernels for this processor")
def test_a_model_that_kernels_fit_has_them_in_the_place_of_its_layers() -> None:
    backend = CpuBackend()
    target = backend.pack(target_of(torch.float32))
    assert backend._stack is not None
    assert target.fused_head is not None


@torch.no_grad()
def test_weights_of_other_types_stay_as_they_are() -> None:
    target = CpuBackend().pack(target_of(torch.float64))
    assert all(module.weight is not None for module in target.modules() if isinstance(module, nn.Linear))
    assert logits(target, torch.arange(5)[None]).isfinite().all()
