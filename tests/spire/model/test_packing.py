"""Packing: kernels in the place of layers where they fit, torch where they do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from spire.kernels import kernels_for
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.cpu.fused_layer import FusedLayer, PartlyFusedLayer
from spire.model.backends.placed import computed_by
from spire.model.config import DraftConfig, ModelConfig
from spire.model.draft import prune
from spire.model.draft_memory import DraftMemory
from spire.model.families import FAMILIES
from spire.model.target import Target, WholeSequence

with_kernels = pytest.mark.skipif(kernels_for(torch.float32) is None, reason="no kernels for this processor")
CPU = torch.device("cpu")


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


@with_kernels
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_model_that_kernels_fit_has_them_in_the_place_of_its_layers(model_type: str) -> None:
    backend = CpuBackend()
    target = backend.pack(target_of(torch.float32, model_type=model_type))
    assert backend._stack is not None
    assert target.fused_head is not None
    assert "torch" not in backend.kernels


@with_kernels
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@torch.no_grad()
def test_biases_and_norms_of_queries_and_keys_are_left_to_torch(model_type: str) -> None:
    backend, tokens_BT = CpuBackend(), torch.arange(20)[None]
    target = target_of(torch.float32, model_type=model_type)
    before = logits(target, tokens_BT)
    found = logits(backend.pack(target), tokens_BT)
    assert (found - before).norm() < 1e-4 * before.norm()
    assert backend._stack is None
    assert all(isinstance(layer, PartlyFusedLayer) and not isinstance(layer, FusedLayer) for layer in target.layers)
    assert target.fused_head is not None
    assert backend.kernels.endswith("torch's own for queries, keys and values")


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@torch.no_grad()
def test_a_draft_that_kernels_fit_in_part_guesses_as_before(model_type: str) -> None:
    values = {"target_fingerprint": "", "tapped_layers": (0, 1), "window": 6}
    plain = prune(target_of(torch.float32, model_type=model_type), DraftConfig.model_validate(values), (0, 1))
    backend, taps_RND = CpuBackend(), torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1))
    rounds = []
    for memory in (DraftMemory(plain, 1), backend.memory(backend.pack(copy.deepcopy(plain)), 1)):
        assert type(memory) is DraftMemory
        memory.absorb(torch.zeros(5, dtype=torch.int64), torch.arange(5), taps_RND)
        rounds.append(memory.round([0], [5], 3))
    for tokens_B in torch.tensor([[7], [11], [13]]):
        right, found = (round_.next_logits(tokens_B) for round_ in rounds)
        assert (found - right).norm() < 1e-4 * right.norm()


def test_what_computes_a_model_is_known_from_its_config() -> None:
    """Before anything is loaded: `spire doctor` says it."""
    for changes in ({}, {"model_type": "qwen3"}, {"attention_bias": True}, {"head_dim": 2}):
        backend, target = CpuBackend(), target_of(torch.float32, **changes)
        backend.pack(target)
        assert computed_by(target.config, CPU, torch.float32) == backend.kernels
    assert computed_by(target_of(torch.float32).config, CPU, torch.float64) == "torch's own"


def test_on_a_gpu_the_layers_of_a_qwen3_are_torch_s() -> None:
    config, found = target_of(torch.float32).config, dict[str, str]()
    for model_type in FAMILIES:
        other = config.model_copy(update={"model_type": model_type})
        found[model_type] = computed_by(other, torch.device("cuda"), torch.bfloat16)
    assert found.pop("qwen3") == "torch's own for layers, CUDA graphs"
    assert set(found.values()) == {"Triton, CUDA graphs"}


@torch.no_grad()
def test_weights_of_other_types_stay_as_they_are() -> None:
    target = CpuBackend().pack(target_of(torch.float64))
    assert all(module.weight is not None for module in target.modules() if isinstance(module, nn.Linear))
    assert logits(target, torch.arange(5)[None]).isfinite().all()
