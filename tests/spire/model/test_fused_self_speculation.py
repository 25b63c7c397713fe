"""MagicDec by kernels: a pass is a plain step of the target over sink and window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spire.kernels import Kernels, every_kernels
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.reference import Reference
from spire.model.cache.contiguous import ContiguousCache
from spire.model.self_speculation import SelfSpeculation, SparseAttention
from spire.model.target import Target
from tests.spire.model.test_fused_layer import each_kernels, far_apart, rounding
from tests.spire.model.test_fused_target import filled, target_of

pytestmark = pytest.mark.skipif(not every_kernels(), reason="no compiler at installation, or none for this processor")

SPARSE, DEPTH = SparseAttention(1, 16), 4
# Within the window, at its end, and far beyond it.
LENGTHS = [5, 17, 40, 250]


def guessed(speculation: SelfSpeculation, slots: list[int]) -> Tensor:
    """Logits [B, k, V] of a round that is fed the same tokens whoever guesses."""
    round_, fed = speculation.round(slots), torch.tensor([7, 11, 13, 17])
    return torch.stack([round_.next_logits(fed[step].expand(len(slots))) for step in range(DEPTH)], dim=1)


def by_kernels(target: Target, cache: ContiguousCache, backend: CpuBackend) -> SelfSpeculation:
    speculation = SelfSpeculation(target, cache, SPARSE, backend)
    assert backend._stack is not None
    assert backend._stack.takes(speculation.sparse_cache.view([0], 1, decoding=True).fused)
    return speculation


@each_kernels
@torch.inference_mode()
def test_a_pass_by_kernels_gives_the_logits_of_the_reference(kernels: Kernels) -> None:
    target, backend = target_of(kernels)
    cache = filled(target, LENGTHS)
    by_torch = SelfSpeculation(target, cache, SPARSE, Reference())
    by_torch.sparse_cache.fused = None
    assert not by_torch.sparse_cache.view([0], 1, decoding=True).fused
    slots = list(range(len(LENGTHS)))
    found, expected = (guessed(each, slots) for each in (by_kernels(target, cache, backend), by_torch))
    # Three layers and a rounded rotation.
    assert far_apart(found, expected) < 4 * rounding(kernels)


@each_kernels
@torch.inference_mode()
def test_within_the_window_a_pass_has_the_bits_of_a_plain_step(kernels: Kernels) -> None:
    target, backend = target_of(kernels)
    cache, slots = filled(target, LENGTHS[:2]), [0, 1]
    drafted = guessed(by_kernels(target, cache, backend), slots)
    fed = torch.tensor([7, 11, 13, 17])
    for step in range(DEPTH):
        view = cache.view(slots, 1, decoding=True)
        hidden_BTD = backend.forward(target, fed[step].expand(2)[:, None], view).hidden_BTD
        cache.commit(slots, [1, 1])
        assert torch.equal(target.unembed(hidden_BTD)[:, 0], drafted[:, step])
