"""A target's layers by one kernel compute what they do one by one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from spire.kernels import Kernels, every_kernels
from spire.model.backends.cpu import fused_layer, fused_target
from spire.model.backends.cpu.backend import CpuBackend
from spire.model.backends.reference import Reference
from spire.model.cache.contiguous import ContiguousCache
from spire.model.cache.stretches import Stretches
from spire.model.cache.target_cache import BatchView
from spire.model.target import Target
from tests.spire.model.test_fused_layer import config_of, randomised

pytestmark = pytest.mark.skipif(not every_kernels(), reason="no compiler at installation, or none for this processor")
each_kernels = pytest.mark.parametrize("kernels", every_kernels(), ids=lambda kernels: kernels.name)

SLOTS, CAPACITY = 6, 300


def target_of(kernels: Kernels) -> tuple[Target, CpuBackend]:
    backend = CpuBackend()
    target = backend.pack(randomised(Target(config_of(4, 2)), kernels.dtype))
    assert isinstance(target, Target)
    return target, backend


def filled(target: Target, lengths: list[int]) -> ContiguousCache:
    """A cache whose slots hold so many positions each."""
    cache = ContiguousCache(target.config, SLOTS, CAPACITY, target.embed_tokens.weight.dtype)
    torch.manual_seed(1)
    for length in lengths:
        slot = cache.allocate()
        target(torch.randint(96, (1, length)), cache.view([slot], length))
        cache.commit([slot], [length])
    return cache


def forwarded(
    target: Target, backend: Reference, lengths: list[int], widths: list[int], taps: tuple[int, ...]
) -> list[Tensor]:
    """What a forward gives and leaves in the cache for stretches of slots, `widths` new tokens in each."""
    cache = filled(target, lengths)
    slots = [list(range(at, SLOTS, len(widths))) for at in range(len(widths))]
    views = [cache.view(some, width, decoding=True) for some, width in zip(slots, widths, strict=True)]
    together: BatchView | Stretches = views[0] if len(views) == 1 else Stretches(views)
    torch.manual_seed(2)
    output = backend.forward(target, torch.randint(96, together.positions_BT.shape), together, taps)
    held = [pool.tensor[:, :, : max(lengths) + max(widths)].clone() for pool in (*cache.keys, *cache.values)]
    return [output.hidden_BTD, *([] if output.taps_BTND is None else [output.taps_BTND]), *held]


@each_kernels
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, CAPACITY - 20), min_size=SLOTS, max_size=SLOTS),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    taps=st.sampled_from([(), (0,), (2,), (0, 1, 2), (2, 0)]),
)
@torch.inference_mode()
def test_one_kernel_gives_the_bits_of_layers_one_by_one(
    kernels: Kernels, lengths: list[int], widths: list[int], taps: tuple[int, ...]
) -> None:
    target, backend = target_of(kernels)
    at_once, one_by_one = (forwarded(target, each, lengths, widths, taps) for each in (backend, Reference()))
    assert len(at_once) == len(one_by_one)
    assert all(map(torch.equal, at_once, one_by_one))


@each_kernels
@torch.inference_mode()
def test_a_tap_is_what_enters_its_layer_not_what_leaves_it(kernels: Kernels) -> None:
    target, backend = target_of(kernels)
    tokens_BT = torch.randint(96, (2, 3))
    cache = filled(target, [5] * 2)
    output = backend.forward(target, tokens_BT, cache.view([0, 1], 3, decoding=True), (0, 1))
    assert output.taps_BTND is not None
    assert torch.equal(output.taps_BTND[:, :, 0], target.embed_tokens(tokens_BT))
    assert not torch.equal(output.taps_BTND[:, :, 1], output.taps_BTND[:, :, 0])


@each_kernels
@pytest.mark.parametrize("token", [-1, 96, 2**40])
@torch.inference_mode()
def test_a_token_that_is_none_is_refused_before_anything_is_read(kernels: Kernels, token: int) -> None:
    target, backend = target_of(kernels)
    cache = filled(target, [5] * 2)
    with pytest.raises(IndexError, match=f"token {token} at position 6"):
        backend.forward(target, torch.tensor([[1, 2], [3, token]]), cache.view([0, 1], 2, decoding=True))


@each_kernels
@torch.inference_mode()
def test_positions_behind_those_whose_rotations_are_kept_go_layer_by_layer(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = forwarded(*target_of(kernels), [40] * SLOTS, [3], (0, 1))
    for module in (fused_layer, fused_target):
        monkeypatch.setattr(module, "MOST_ROTATIONS", 16)
    target, backend = target_of(kernels)
    assert backend._stack is not None
    assert not backend._stack.takes(filled(target, [40]).view([0], 3, decoding=True).fused)
    assert all(map(torch.equal, at_once, forwarded(target, backend, [40] * SLOTS, [3], (0, 1))))


@each_kernels
@torch.inference_mode()
def test_a_forward_of_which_kernels_attend_only_a_part_goes_layer_by_layer(kernels: Kernels) -> None:
    target, backend = target_of(kernels)
    cache = filled(target, [5] * 2)
    part = Stretches([cache.view([0], 2, decoding=True), cache.view([1], 2, causal=False)])
    assert not part.fused
    whole = Stretches([cache.view([0], 2, decoding=True), cache.view([1], 2, decoding=True)])
    assert whole.fused
    tokens_1R = torch.randint(96, (1, 4))
    near, exact = (backend.forward(target, tokens_1R, views).hidden_BTD for views in (part, whole))
    # The first two rows attend by the same kernel, the others by torch's, which sums in another order.
    assert torch.equal(near[:, :2], exact[:, :2])
    assert (near - exact).float().norm() < 2.0**-5 * exact.float().norm()
