"""Layers by tiles compute what layers do, to bfloat16, and the same for a row whoever else is there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spire.model.cache import TargetCache
from spire.model.config import ModelConfig
from spire.model.layers import Layer, Rope
from spire.model.packing import pack
from spire.model.target import Target
from spire.model.tile_layer import TileLayer
from spire.model.tiles import available

pytestmark = pytest.mark.skipif(not available(), reason="no compiler at installation, or no tiles")

# A wrong number among 160 weighs 1 / sqrt(160) of their length at least: a few roundings to bfloat16 a fifth of this.
ROUNDING = 2.0**-5


def config_of(heads: int = 2, kv_heads: int = 1, **changes: object) -> ModelConfig:
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 64}
    shape = {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048}
    return ModelConfig.model_validate({**shape, **changes})


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=parameter.shape[-1] ** -0.5)
    return model.bfloat16().requires_grad_(False)


def layer_and_rope(config: ModelConfig, B: int, T: int) -> tuple[Layer, tuple[Tensor, Tensor]]:
    layer = randomised(Layer(config))
    assert isinstance(layer, Layer)
    return layer, Rope(config.head_dim, config.rope)(torch.arange(T).expand(B, T) + 100, torch.bfloat16)


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 40),
    T=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    widths=st.sampled_from([{}, {"hidden_size": 64, "intermediate_size": 32, "head_dim": 32}]),
)
@torch.inference_mode()
def test_a_layer_by_tiles_computes_what_the_layer_does(
    B: int, T: int, heads: tuple[int, int], widths: dict[str, int]
) -> None:
    config = config_of(*heads, **widths)
    layer, rope = layer_and_rope(config, B, T)
    tiles = TileLayer(layer)
    input_BTD = torch.randn(B, T, config.hidden_size).bfloat16()
    attended_BHTK = torch.randn(B, heads[0], T, config.head_dim).bfloat16()
    for found, expected in zip(
        (*tiles.queries_keys_values(input_BTD, rope), *tiles.keys_values(input_BTD, rope)),
        (*layer.queries_keys_values(input_BTD, rope), *layer.keys_values(input_BTD, rope)),
        strict=True,
    ):
        assert far_apart(found, expected) < ROUNDING
    assert far_apart(tiles.behind(input_BTD, attended_BHTK), layer.behind(input_BTD, attended_BHTK)) < ROUNDING


def far_apart(found_D: Tensor, expected_D: Tensor) -> float:
    """How far the worst of vectors [..., D] is off, as a share of its length."""
    return ((found_D - expected_D).float().norm(dim=-1) / expected_D.float().norm(dim=-1)).max().item()


@torch.inference_mode()
def test_a_target_by_tiles_is_as_near_to_float32_as_the_other() -> None:
    target = randomised(Target(config_of(4, 2)))
    assert isinstance(target, Target)
    tokens_BT = torch.randint(96, (3, 20))
    exact, by_torch = (logits(model, tokens_BT) for model in (with_floats(target), target))
    by_tiles = logits(pack(target), tokens_BT)
    assert isinstance(target.layers[0], TileLayer)
    assert (by_tiles - exact).abs().mean() <= 1.1 * (by_torch - exact).abs().mean()


def with_floats(target: Target) -> Target:
    wide = Target(target.config)
    wide.load_state_dict(target.state_dict())
    return wide.requires_grad_(False)


def logits(target: Target, tokens_BT: Tensor) -> Tensor:
    cache = TargetCache(target.config, len(tokens_BT), 64, target.embed_tokens.weight.dtype)
    slots = [cache.allocate() for _ in tokens_BT]
    return target.unembed(target(tokens_BT, cache.view(slots, tokens_BT.shape[1])).hidden_BTD)


@torch.inference_mode()
def test_a_position_computes_the_same_bits_verified_or_decoded_and_whoever_else_does() -> None:
    target = pack(randomised(Target(config_of(4, 2))))
    assert isinstance(target, Target)
    prompts_BT, block_BT = torch.randint(96, (5, 300)), torch.randint(96, (5, 7))
    verified = decoded(target, prompts_BT, block_BT, together=True)
    for row in range(5):
        alone = decoded(target, prompts_BT[row : row + 1], block_BT[row : row + 1], together=False)
        assert torch.equal(alone[0], verified[row])


def decoded(target: Target, prompts_BT: Tensor, block_BT: Tensor, together: bool) -> Tensor:
    """Logits of a block behind prompts that were each prefilled alone, in one forward or position by position."""
    cache = TargetCache(target.config, len(prompts_BT), 400, torch.bfloat16)
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


@torch.inference_mode()
def test_numbers_that_are_none_stay_in_their_row() -> None:
    layer, rope = layer_and_rope(config_of(), 40, 1)
    tiles = TileLayer(layer)
    input_BTD, attended_BHTK = torch.randn(40, 1, 128).bfloat16(), torch.randn(40, 2, 1, 64).bfloat16()
    input_BTD[17, 0, 5] = float("nan")
    attended_BHTK[33, 1, 0, 9] = float("inf")
    (queries, _, _), out_BTD = tiles.queries_keys_values(input_BTD, rope), tiles.behind(input_BTD, attended_BHTK)
    assert (~queries.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist() == [17]
    assert (~out_BTD.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist() == [17, 33]


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"hidden_size": 80}, {"head_dim": 16}])
def test_shapes_that_tiles_do_not_fit_are_left_to_torch(changes: dict[str, object]) -> None:
    target = pack(randomised(Target(config_of(**changes))))
    assert isinstance(target, Target)
    assert not isinstance(target.layers[0], TileLayer)
