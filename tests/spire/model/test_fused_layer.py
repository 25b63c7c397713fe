"""Layers by kernels of ours compute what layers do, and the same for a row whoever else is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from spire.kernels import Kernels, every_kernels
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.cpu.fused_layer import FusedLayer, PartlyFusedLayer
from spire.model.cache.contiguous import ContiguousCache
from spire.model.config import ModelConfig
from spire.model.layers import Layer, Rope
from spire.model.target import Target

pytestmark = pytest.mark.skipif(not every_kernels(), reason="no compiler at installation, or none for this processor")
each_kernels = pytest.mark.parametrize("kernels", every_kernels(), ids=lambda kernels: kernels.name)


def rounding(kernels: Kernels) -> float:
    """A wrong number among 160 weighs 1 / sqrt(160) of their length at least: a few roundings to bfloat16 a fifth of
    this, those to fp32 far less than theirs."""
    return 2.0**-5 if kernels.dtype == torch.bfloat16 else 2.0**-17


def config_of(heads: int = 2, kv_heads: int = 1, **changes: object) -> ModelConfig:
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 64}
    shape = {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048}
    return ModelConfig.model_validate({**shape, **changes})


def randomised(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=parameter.shape[-1] ** -0.5)
    return model.to(dtype).requires_grad_(False)


def layer_and_rope(kernels: Kernels, config: ModelConfig, B: int, T: int) -> tuple[Layer, tuple[Tensor, Tensor]]:
    layer = randomised(Layer(config), kernels.dtype)
    assert isinstance(layer, Layer)
    return layer, Rope(config.head_dim, config.rope)(torch.arange(T).expand(B, T) + 100, kernels.dtype)


@each_kernels
@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 80),  # more rows than are multiplied at once
    T=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    widths=st.sampled_from([{}, {"hidden_size": 64, "intermediate_size": 32, "head_dim": 32}]),
)
@torch.inference_mode()
def test_a_fused_layer_computes_what_the_layer_does(
    kernels: Kernels, B: int, T: int, heads: tuple[int, int], widths: dict[str, int]
) -> None:
    config = config_of(*heads, **widths)
    layer, rope = layer_and_rope(kernels, config, B, T)
    fused = FusedLayer(layer, kernels)
    input_BTD = torch.randn(B, T, config.hidden_size).to(kernels.dtype)
    attended_BHTK = torch.randn(B, heads[0], T, config.head_dim).to(kernels.dtype)
    for found, expected in zip(
        (*fused.queries_keys_values(input_BTD, rope), *fused.keys_values(input_BTD, rope)),
        (*layer.queries_keys_values(input_BTD, rope), *layer.keys_values(input_BTD, rope)),
        strict=True,
    ):
        assert far_apart(found, expected) < rounding(kernels)
    assert far_apart(fused.behind(input_BTD, attended_BHTK), layer.behind(input_BTD, attended_BHTK)) < rounding(kernels)


@each_kernels
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@torch.inference_mode()
def test_a_partly_fused_layer_computes_what_the_layer_does(kernels: Kernels, model_type: str) -> None:
    config = config_of(4, 2, model_type=model_type)
    layer, rope = layer_and_rope(kernels, config, 7, 3)
    input_BTD = torch.randn(7, 3, config.hidden_size).to(kernels.dtype)
    attended_BHTK = torch.randn(7, 4, 3, config.head_dim).to(kernels.dtype)
    front = (*layer.queries_keys_values(input_BTD, rope), *layer.keys_values(input_BTD, rope))
    behind = layer.behind(input_BTD, attended_BHTK)
    fused = PartlyFusedLayer(layer, kernels)
    found = (*fused.queries_keys_values(input_BTD, rope), *fused.keys_values(input_BTD, rope))
    assert all(map(torch.equal, found, front))
    assert far_apart(fused.behind(input_BTD, attended_BHTK), behind) < rounding(kernels)


def far_apart(found_D: Tensor, expected_D: Tensor) -> float:
    """How far the worst of vectors [..., D] is off, as a share of its length."""
    return ((found_D - expected_D).float().norm(dim=-1) / expected_D.float().norm(dim=-1)).max().item()


@each_kernels
@torch.inference_mode()
def test_a_fused_target_is_as_near_to_exact_numbers_as_the_other(kernels: Kernels) -> None:
    target = randomised(Target(config_of(4, 2)), kernels.dtype)
    assert isinstance(target, Target)
    tokens_BT = torch.randint(96, (3, 20))
    exact, by_torch = (logits(model, tokens_BT) for model in (with_doubles(target), target))
    fused = logits(CpuBackend().pack(target), tokens_BT)
    assert isinstance(target.layers[0], FusedLayer)
    # Sums of floats come in another order.
    assert (fused - exact).abs().mean() <= (1.1 if kernels.dtype == torch.bfloat16 else 2) * (
        by_torch - exact
    ).abs().mean()


def with_doubles(target: Target) -> Target:
    wide = Target(target.config)
    wide.load_state_dict(target.state_dict())
    return wide.double().requires_grad_(False)


def logits(target: Target, tokens_BT: Tensor) -> Tensor:
    cache = ContiguousCache(target.config, len(tokens_BT), 64, target.embed_tokens.weight.dtype)
    slots = [cache.allocate() for _ in tokens_BT]
    return target.unembed(target(tokens_BT, cache.view(slots, tokens_BT.shape[1])).hidden_BTD)


@each_kernels
@torch.inference_mode()
def test_a_position_has_the_same_bits_verified_or_decoded_in_any_batch(kernels: Kernels) -> None:
    target = CpuBackend().pack(randomised(Target(config_of(4, 2)), kernels.dtype))
    assert isinstance(target, Target)
    prompts_BT, block_BT = torch.randint(96, (5, 300)), torch.randint(96, (5, 7))
    verified = decoded(target, prompts_BT, block_BT, together=True)
    for row in range(5):
        alone = decoded(target, prompts_BT[row : row + 1], block_BT[row : row + 1], together=False)
        assert torch.equal(alone[0], verified[row])


def decoded(target: Target, prompts_BT: Tensor, block_BT: Tensor, together: bool) -> Tensor:
    """Logits of a block behind prompts that were each prefilled alone, in one forward or position by position."""
    cache = ContiguousCache(target.config, len(prompts_BT), 400, target.embed_tokens.weight.dtype)
    slots = [cache.allocate() for _ in prompts_BT]
    for slot, prompt_T in zip(slots, prompts_BT, strict=True):
        target(prompt_T[None], cache.view([slot], len(prompt_T)))
        cache.commit([slot], [len(prompt_T)])
    found = []
    for tokens_BT in [block_BT] if together else block_BT.split(1, dim=1):
        width = tokens_BT.shape[1]
        found.append(target.unembed(target(tokens_BT, cache.view(slots, width, decoding=True)).hidden_BTD))
        cache.commit(slots, [width] * len(slots))
    return torch.cat(found, dim=1)


@each_kernels
@torch.inference_mode()
def test_numbers_that_are_none_stay_in_their_row(kernels: Kernels) -> None:
    layer, rope = layer_and_rope(kernels, config_of(), 40, 1)
    fused = FusedLayer(layer, kernels)
    input_BTD, attended_BHTK = torch.randn(40, 1, 128).to(kernels.dtype), torch.randn(40, 2, 1, 64).to(kernels.dtype)
    input_BTD[17, 0, 5] = float("nan")
    attended_BHTK[33, 1, 0, 9] = float("inf")
    (queries, _, _), out_BTD = fused.queries_keys_values(input_BTD, rope), fused.behind(input_BTD, attended_BHTK)
    assert (~queries.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist() == [17]
    assert (~out_BTD.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist() == [17, 33]


@each_kernels
@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"hidden_size": 80}, {"head_dim": 16}, {"model_type": "qwen3"}]
)
def test_shapes_that_kernels_do_not_fit_are_left_to_torch(kernels: Kernels, changes: dict[str, object]) -> None:
    target = CpuBackend().pack(randomised(Target(config_of(**changes)), kernels.dtype))
    assert isinstance(target, Target)
    assert not isinstance(target.layers[0], FusedLayer)
