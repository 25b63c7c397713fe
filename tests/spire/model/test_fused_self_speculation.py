"""MagicDec by kernels: a pass is a plain step of the target over sink and window, and draws by a kernel too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spire.decoding.drafting import RoundInputs
from spire.decoding.randomness import Purpose
from spire.kernels import Kernels, every_kernels, kernels_for
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.reference import Reference
from spire.model.cache.contiguous import ContiguousCache
from spire.model.self_speculation import SelfSpeculation, SparseAttention
from spire.model.target import Target
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import Sampling
from tests.spire.model.test_fused_draft import drawn
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


@each_kernels
@torch.inference_mode()
def test_a_round_draws_from_each_pass_what_a_kernel_draws(kernels: Kernels) -> None:
    """Greedy, as it is, and at a temperature."""
    target, backend = target_of(kernels)
    speculation, slots = by_kernels(target, filled(target, LENGTHS[1:]), backend), [0, 1, 2]
    rows = from_protos([Sampling(temperature=temperature, top_p=1, seed=3) for temperature in (0, 1, 0.5)])
    newest_B, base_B = torch.tensor([7, 11, 13]), torch.tensor(LENGTHS[1:])
    inputs = RoundInputs(newest_B, base_B, DEPTH, rows, None)
    drafted = backend.draft(speculation.round(slots), inputs, lambda _: None)
    assert drafted.ids_BKM is None
    assert drafted.probs_BKM is not None
    uniforms_BK = rows.uniforms(base_B, DEPTH, Purpose.DRAFT)
    served, round_, fed_B = kernels_for(kernels.dtype), speculation.round(slots), newest_B
    assert served is not None
    for step in range(DEPTH):
        logits_BV = round_.next_logits(fed_B)
        fed_B, probs_BV = drawn(served, logits_BV, rows.temperature_B, uniforms_BK[:, step].contiguous())
        assert torch.equal(fed_B, drafted.tokens_BK[:, step])
        assert torch.equal(probs_BV[1:], drafted.probs_BKM[1:, step])
