"""A float32 model whose weights bfloat16 holds exactly is computed from half of the bytes, with the same results."""

from __future__ import annotations

import copy
from itertools import chain
from typing import cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import spire.model.backends.cpu.fused_layer
from spire.kernels import Kernels, every_kernels
from spire.model.backends.cpu import weights
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.cpu.fused_layer import FusedLayer
from spire.model.backends.cpu.weights import BlockedWeight
from spire.model.target import Target
from tests.spire.model.test_fused_draft import memory_of, unpacked_draft
from tests.spire.model.test_fused_layer import config_of, randomised
from tests.spire.model.test_fused_target import forwarded

KERNELS = [kernels for kernels in every_kernels() if kernels.dtype == torch.float32]
each_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=[kernels.name for kernels in KERNELS])
pytestmark = pytest.mark.skipif(not KERNELS, reason="no kernels for this processor")


def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store weights as float32 whatever their numbers are."""
    monkeypatch.setattr(weights, "is_bfloat16", lambda weight_ED: False)


def product(kernels: Kernels, x_RD: Tensor, weight: BlockedWeight) -> Tensor:
    out_RE = torch.empty(len(x_RD), weight.outputs)
    kernels.project(x_RD, *weight, out_RE, *x_RD.shape, weight.outputs, 2)
    return out_RE


@each_kernels
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 110), scale=st.sampled_from([1e-30, 1.0, 1e30]))
def test_a_product_by_narrow_weights_is_the_same_bit_for_bit(
    kernels: Kernels, seed: int, rows: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_ED = (scale * torch.randn(96, 64, generator=generator)).bfloat16().float()
    x_RD = torch.randn(rows, 64, generator=generator)
    narrow = BlockedWeight.of(weight_ED, kernels)
    assert narrow.narrow
    assert narrow.values.nbytes == weight_ED.nbytes // 2
    with pytest.MonkeyPatch.context() as patch:
        wide(patch)
        stored = BlockedWeight.of(weight_ED, kernels)
    assert (stored.narrow, stored.values.dtype) == (False, torch.float32)
    assert torch.equal(product(kernels, x_RD, narrow), product(kernels, x_RD, stored))
    behind = narrow.from_output(64)
    assert torch.equal(product(kernels, x_RD, behind), product(kernels, x_RD, stored.from_output(64)))


@each_kernels
@pytest.mark.parametrize("place", [0, 5000])
def test_a_weight_with_one_number_that_bfloat16_rounds_stays_float32(kernels: Kernels, place: int) -> None:
    """Also one beyond the outputs that are compared at once."""
    weight_ED = torch.randn(5120, 32).bfloat16().float()
    weight_ED[place, 3] = 1 + 2**-12
    found = BlockedWeight.of(weight_ED, kernels)
    assert not found.narrow
    x_RD = torch.eye(32)
    assert torch.equal(product(kernels, x_RD, found), weight_ED.T)


@each_kernels
@torch.inference_mode()
def test_a_target_decodes_the_same_bit_for_bit(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and steps: hidden states, activations, logits, and what the cache holds."""
    monkeypatch.setattr(spire.model.backends.cpu.fused_layer, "kernels_for", lambda dtype: kernels)
    exact = randomised(Target(config_of(4, 2)), torch.bfloat16).float()

    def found(stored: torch.dtype) -> list[Tensor]:
        backend = CpuBackend()
        target = cast(Target, backend.pack(copy.deepcopy(exact)))
        assert cast(FusedLayer, target.layers[0])._queries_keys_values.values.dtype == stored
        made = [forwarded(target, backend, [40, 7] * 3, widths, (0, 2)) for widths in ([9, 1], [1], [5, 3])]
        return [*chain.from_iterable(made), *(target.unembed(hidden_BTD) for hidden_BTD, *_ in made)]

    narrow = found(torch.bfloat16)
    wide(monkeypatch)
    assert all(torch.equal(*pair) for pair in zip(narrow, found(torch.float32), strict=True))


@each_kernels
@torch.inference_mode()
def test_a_draft_guesses_the_same_bit_for_bit(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spire.model.backends.cpu.fused_layer, "kernels_for", lambda dtype: kernels)
    draft, fed_B = unpacked_draft(kernels).bfloat16().float(), torch.tensor([7, 11])

    def logits() -> Tensor:
        torch.manual_seed(1)
        memory = memory_of(CpuBackend().pack(copy.deepcopy(draft)), [30, 9])
        round_ = memory.round([0, 1], [30, 9], 3)
        return torch.stack([round_.next_logits(fed_B + step).clone() for step in range(3)])

    narrow = logits()
    wide(monkeypatch)
    assert torch.equal(narrow, logits())
