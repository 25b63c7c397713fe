"""A draft whose weights the CPU kernels read in fp8 guesses what the draft with these rounded weights guesses."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import spire.model.backends.cpu.fused_layer
import spire.model.backends.placed
from spire.errors import CheckpointError
from spire.kernels import Kernels, every_kernels
from spire.model.backends.cpu.backend import CpuBackend, Fp8
from spire.model.backends.cpu.fused_layer import FusedLayer
from spire.model.backends.cpu.weights import BlockedWeight, fp8_of, of_fp8
from spire.model.backends.placed import draft_backend_for
from spire.model.draft import Draft
from tests.spire.model.test_fused_draft import memory_of, unpacked_draft
from tests.spire.model.test_fused_layer import far_apart, rounding

KERNELS = every_kernels()
each_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=[kernels.name for kernels in KERNELS])
needs_kernels = pytest.mark.skipif(not KERNELS, reason="no kernels for this processor")


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-6, 1.0, 300.0]))
def test_a_weight_is_rounded_to_five_bits(seed: int, scale: float) -> None:
    """Below a 248th of the largest of its output, the smallest magnitude that there is takes its place."""
    weight_ED = scale * torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))
    values_ED, scale_E = fp8_of(weight_ED)
    rounded_ED, least_E1 = of_fp8(values_ED, scale_E), weight_ED.abs().amax(dim=1, keepdim=True) / 248
    assert values_ED.dtype == torch.uint8
    within_ED = (rounded_ED - weight_ED).abs() <= (weight_ED.abs() / 32 + 1e-12).maximum(least_E1 * 1.01)
    assert within_ED.all()
    assert torch.equal(rounded_ED.sign(), torch.where(weight_ED < 0, -1.0, 1.0))


def test_an_output_without_weights_stays_without() -> None:
    assert of_fp8(*fp8_of(torch.zeros(2, 32))).abs().max() < 1e-12


@needs_kernels
@each_kernels
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_a_product_multiplies_by_the_rounded_weight(kernels: Kernels, rows: int) -> None:
    weight_ED, x_RD = torch.randn(96, 128), torch.randn(rows, 128).to(kernels.dtype)
    blocked, out_RE = BlockedWeight.of(weight_ED, kernels, fp8=True), torch.empty(rows, 96)
    kernels.project(x_RD, *blocked, out_RE, rows, 128, 96, 2)
    expected_RE = x_RD.float() @ of_fp8(*fp8_of(weight_ED)).T
    torch.testing.assert_close(out_RE, expected_RE, rtol=1e-4, atol=1e-4)
    behind, out_RE = blocked.from_output(64), torch.empty(rows, 32)
    kernels.project(x_RD, *behind, out_RE, rows, 128, 32, 2)
    torch.testing.assert_close(out_RE, expected_RE[:, 64:], rtol=1e-4, atol=1e-4)


@needs_kernels
@each_kernels
@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_of_a_product_is_the_same_alone_or_among_others(kernels: Kernels, fp8: bool) -> None:
    """Of a weight so wide that only a part of its outputs is multiplied at once."""
    weight_ED, x_RD = torch.randn(160, 4096).to(kernels.dtype), torch.randn(70, 4096).to(kernels.dtype)
    blocked, out_RE, alone_E = BlockedWeight.of(weight_ED, kernels, fp8), torch.empty(70, 160), torch.empty(160)
    kernels.project(x_RD, *blocked, out_RE, 70, 4096, 160, 2)
    multiplied_ED = of_fp8(*fp8_of(weight_ED)) if fp8 else weight_ED.float()
    torch.testing.assert_close(out_RE, x_RD.float() @ multiplied_ED.T, rtol=1e-3, atol=1e-2)
    for row in range(70):
        kernels.project(x_RD[row], *blocked, alone_E, 1, 4096, 160, 2)
        assert torch.equal(alone_E, out_RE[row])


def rounded(draft: Draft) -> Draft:
    """The same draft with weights of products that are rounded as kernels do."""
    draft = copy.deepcopy(draft).float()
    for linear in (module for module in draft.modules() if isinstance(module, nn.Linear)):
        linear.weight = nn.Parameter(of_fp8(*fp8_of(linear.weight.detach())), requires_grad=False)
    return draft


@needs_kernels
@each_kernels
@torch.inference_mode()
def test_a_draft_in_fp8_guesses_as_with_rounded_weights(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it remembers of its target passes through rounded weights, too."""
    monkeypatch.setattr(spire.model.backends.cpu.fused_layer, "kernels_for", lambda dtype: kernels)
    draft, contexts, fed_B = unpacked_draft(kernels), [30, 9], torch.tensor([7, 11])

    def logits(draft: Draft, backend: CpuBackend) -> Tensor:
        torch.manual_seed(1)
        memory = memory_of(backend.pack(draft), contexts)
        round_ = memory.round([0, 1], contexts, 3)
        return torch.stack([round_.next_logits(fed_B + step).clone() for step in range(3)])

    expected, exact = rounded(draft).to(kernels.dtype), copy.deepcopy(draft)
    found = logits(draft, CpuBackend(Fp8.ALWAYS))
    assert cast(FusedLayer, draft.layers[0])._queries_keys_values.scale_E is not None
    near, away = (far_apart(found, logits(other, CpuBackend())) for other in (expected, exact))
    # The rounded weights of `expected` are rounded once more to the type of the kernels.
    assert near < 4 * rounding(kernels)
    assert near < away


@needs_kernels
def test_a_draft_without_kernels_is_refused_if_it_must_be_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spire.model.backends.cpu.fused_layer, "kernels_for", lambda dtype: None)
    with pytest.raises(CheckpointError, match="no kernels here compute this draft"):
        CpuBackend(Fp8.ALWAYS).pack(unpacked_draft(KERNELS[0]))
    draft = CpuBackend(Fp8.IF_FITTING).pack(unpacked_draft(KERNELS[0]))
    assert not isinstance(draft.layers[0], FusedLayer)


@pytest.mark.parametrize(
    ("quantization", "found"), [("none", Fp8.NEVER), ("auto", Fp8.IF_FITTING), ("fp8", Fp8.ALWAYS)]
)
def test_a_cpu_s_draft_is_in_fp8_unless_told_otherwise(
    quantization: str, found: Fp8, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spire.model.backends.placed, "draft_in_fp8", lambda device, dtype: True)
    backend = draft_backend_for(torch.device("cpu"), torch.bfloat16, quantization)
    assert isinstance(backend, CpuBackend)
    assert backend._fp8 is found
    monkeypatch.setattr(spire.model.backends.placed, "draft_in_fp8", lambda device, dtype: False)
    slow = draft_backend_for(torch.device("cpu"), torch.bfloat16)
    assert isinstance(slow, CpuBackend)
    assert slow._fp8 is Fp8.NEVER
