"""The target's cache: whatever is appended in whatever pieces, the logits are those of the whole sequence."""

from __future__ import annotations

import mmap
import random
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spire.errors import OutOfCapacity
from spire.kernels import kernels_for
from spire.model.cache import paging
from spire.model.cache.contiguous import ContiguousCache
from spire.model.cache.paged import PagedCache
from spire.model.cache.stretches import Stretches
from spire.model.cache.target_cache import TargetCache
from spire.model.config import ModelConfig
from spire.model.target import Target, WholeSequence
from tests.marks import thoroughly

V, CAPACITY = 40, 100


class WithoutKernels(ContiguousCache):
    """Read by torch's flash kernel."""

    @staticmethod
    def _fused_pools(dtype: torch.dtype) -> None:
        return None


_CACHES = {
    "small pages": ContiguousCache,
    "one page": ContiguousCache,
    "without kernels": WithoutKernels,
    "as on a GPU": PagedCache,
}


# Of a cache in use: most tests have it smaller.
_PAGE = paging.PAGE


@pytest.fixture(autouse=True, params=_CACHES)
def new_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[TargetCache]:
    for name in ("PAGE", "GPU_PAGE"):
        monkeypatch.setattr(f"spire.model.cache.paging.{name}", 256 if request.param == "one page" else 16)
    return _CACHES[request.param]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda heads: f"{heads} key heads")
def target(request: pytest.FixtureRequest) -> Target:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=request.param,
        head_dim=64,
    )
    target = Target(config).requires_grad_(False)
    for parameter in target.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.3)
    return target


@pytest.fixture(autouse=True)
def without_gradients() -> object:
    with torch.no_grad():
        yield


def test_each_kind_of_cache_is_read_as_it_says(target: Target) -> None:
    kernels = kernels_for(torch.float32)
    caches = {kind: cache(target.config, 1, CAPACITY) for kind, cache in _CACHES.items()}
    assert caches["as on a GPU"].view([0], 1).fused == ()
    assert caches["without kernels"].view([0], 1).fused == []
    assert bool(caches["small pages"].view([0], 1).fused) == bool(kernels and kernels.attends(target.config.head_dim))


def whole_logits(target: Target, tokens_L: Tensor) -> Tensor:
    return target.unembed(target(tokens_L[None], WholeSequence(tokens_L[None])).hidden_BTD[0])


@pytest.mark.parametrize("seed", [0, *map(thoroughly, range(1, 8))])
def test_ragged_appends_equal_the_whole_sequence(target: Target, new_cache: type[TargetCache], seed: int) -> None:
    """Any subset of the slots, in any order, any number of tokens of which only some are committed, up to the brim."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    cache = new_cache(target.config, slots=10, capacity=CAPACITY)
    slots = [cache.allocate() for _ in range(10)]
    tokens_NL = torch.randint(V, (10, CAPACITY + 40))
    expected = [whole_logits(target, tokens_L[:CAPACITY]) for tokens_L in tokens_NL]
    while any(length < CAPACITY for length in cache.lengths):
        chosen = random_.choice([slots, slots[1:7], random_.sample(slots, random_.randint(1, 10))])
        T = random_.choice([1, 2, 5, 17, 40])
        tokens_BT = torch.stack([tokens_NL[s, cache.lengths[s] : cache.lengths[s] + T] for s in chosen])
        real = [min(T, CAPACITY - cache.lengths[s]) for s in chosen]
        for row, count in enumerate(real):
            tokens_BT[row, random_.randint(0, count) :] = 7  # rejected: never committed, or padding
        counts = [_agreeing(tokens_BT[row], tokens_NL[s], cache.lengths[s], real[row]) for row, s in enumerate(chosen)]
        logits_BTV = target.unembed(target(tokens_BT, cache.view(chosen, T)).hidden_BTD)
        for row, slot in enumerate(chosen):
            start = cache.lengths[slot]
            torch.testing.assert_close(
                logits_BTV[row, : counts[row]], expected[slot][start : start + counts[row]], atol=1e-4, rtol=1e-4
            )
        cache.commit(chosen, counts)


def _agreeing(fed_T: Tensor, wanted_L: Tensor, start: int, limit: int) -> int:
    """How many of the tokens fed are the sequence's own: those are committed."""
    same = (fed_T[:limit] == wanted_L[start : start + limit]).long()
    return int(same.cumprod(0).sum())


def test_rejected_tokens_never_change_later_logits(target: Target, new_cache: type[TargetCache]) -> None:
    tokens_L = torch.randint(V, (30,))
    clean, dirty = (new_cache(target.config, slots=1, capacity=CAPACITY) for _ in range(2))
    for cache in (clean, dirty):
        cache.allocate()
        target(tokens_L[None, :10], cache.view([0], 10))
        cache.commit([0], [10])
    target(torch.randint(V, (1, 20)), dirty.view([0], 20))
    dirty.commit([0], [0])
    a, b = (target(tokens_L[None, 10:13], cache.view([0], 3)).hidden_BTD for cache in (clean, dirty))
    assert torch.equal(a, b)


def test_a_new_sequence_sees_nothing_of_the_slots_former_one(target: Target, new_cache: type[TargetCache]) -> None:
    cache = new_cache(target.config, slots=1, capacity=CAPACITY)
    cache.allocate()
    target(torch.randint(V, (1, 90)), cache.view([0], 90))
    cache.commit([0], [90])
    cache.free(0)
    assert cache.allocate() == 0
    tokens_L = torch.randint(V, (60,))
    logits_TV = target.unembed(target(tokens_L[None], cache.view([0], 60)).hidden_BTD[0])
    torch.testing.assert_close(logits_TV, whole_logits(target, tokens_L), atol=1e-4, rtol=1e-4)


def test_a_scrubbed_slot_forgets_numbers_that_are_not_finite(target: Target, new_cache: type[TargetCache]) -> None:
    cache = new_cache(target.config, slots=1, capacity=CAPACITY)
    cache.allocate()
    assert cache.reserve([0], CAPACITY)
    for pool_RK in chain(*cache.pools):
        pool_RK.fill_(float("nan"))
    cache.free(0, scrub=True)
    cache.allocate()
    assert target(torch.tensor([[1, 2, 3]]), cache.view([0], 3)).hidden_BTD.isfinite().all()


def test_slots_are_given_lowest_first_and_run_out(target: Target, new_cache: type[TargetCache]) -> None:
    cache = new_cache(target.config, slots=3, capacity=CAPACITY)
    assert [cache.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfCapacity, match="all 3"):
        cache.allocate()
    cache.free(2)
    cache.free(0)
    assert cache.free_slots == 2
    assert cache.allocate() == 0


def test_committing_beyond_the_capacity_is_refused(target: Target, new_cache: type[TargetCache]) -> None:
    cache = new_cache(target.config, slots=1, capacity=CAPACITY)
    cache.allocate()
    with pytest.raises(OutOfCapacity):
        cache.commit([0], [CAPACITY + 1])


def test_several_stretches_in_one_forward_are_what_each_would_be_alone(
    target: Target, new_cache: type[TargetCache]
) -> None:
    torch.manual_seed(0)
    tokens_NL = torch.randint(V, (5, 60))
    cache = new_cache(target.config, slots=5, capacity=CAPACITY)
    slots = [cache.allocate() for _ in range(5)]
    target(tokens_NL[:, :30], cache.view(slots, 30))
    cache.commit(slots, [30] * 5)
    stretches = [([0, 2, 3], 4), ([1], 25), ([4], 1)]
    views = Stretches([cache.view(chosen, T) for chosen, T in stretches])
    tokens_1R = torch.cat([tokens_NL[chosen, 30 : 30 + T].flatten() for chosen, T in stretches])[None]
    hidden, taps = target(tokens_1R, views, tapped_layers=(1,))
    assert taps is not None
    for (chosen, T), hidden_BTD, taps_BTND in zip(stretches, views.split(hidden), views.split(taps), strict=True):
        whole = tokens_NL[chosen, : 30 + T]
        expected = target(whole, WholeSequence(whole), tapped_layers=(1,))
        assert expected.taps_BTND is not None
        torch.testing.assert_close(hidden_BTD, expected.hidden_BTD[:, 30:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(taps_BTND, expected.taps_BTND[:, 30:], atol=1e-4, rtol=1e-4)


def test_a_copy_goes_on_as_the_original_would(target: Target, new_cache: type[TargetCache]) -> None:
    torch.manual_seed(0)
    tokens_L = torch.randint(V, (80,))
    cache = new_cache(target.config, slots=2, capacity=CAPACITY, parking=1)
    cache.allocate()
    target(tokens_L[None, :70], cache.view([0], 70))
    cache.commit([0], [70])
    cache.copy(0, 2, 65)
    rows = cache.rows([0], torch.arange(70)[None]).flatten()
    if isinstance(cache, ContiguousCache):
        for pool_RK in chain(*cache.pools):
            pool_RK[rows] = 7.0
    logits = target.unembed(target(tokens_L[None, 65:], cache.view([2], 15)).hidden_BTD[0])
    torch.testing.assert_close(logits, whole_logits(target, tokens_L)[65:], atol=1e-4, rtol=1e-4)


def test_memory_is_promised_up_to_the_budget_and_reused_once_freed(target: Target) -> None:
    pages = CAPACITY // paging.PAGE + 1
    page_bytes = ContiguousCache(target.config, slots=1, capacity=CAPACITY).page_bytes
    cache = ContiguousCache(target.config, slots=4, capacity=CAPACITY, budget=2 * pages * page_bytes)
    slots = [cache.allocate() for _ in range(3)]
    assert cache.reserve(slots[:2], CAPACITY)
    assert cache.held_bytes == cache.bytes
    assert not cache.reserve(slots[2:], 1)
    with pytest.raises(OutOfCapacity, match="no memory"):
        cache.view(slots[2:], 1)
    cache.free(slots[0])
    assert cache.reserve(slots[2:], CAPACITY)
    assert cache.held_bytes == cache.bytes


def test_a_budget_too_small_for_one_sequence_is_refused(target: Target) -> None:
    with pytest.raises(OutOfCapacity, match="too little for one sequence of 100 positions"):
        ContiguousCache(target.config, slots=4, capacity=CAPACITY, budget=10)


def test_memory_comes_with_what_is_written_and_goes_with_it(target: Target) -> None:
    """Address space for gigabytes costs nothing; a long sequence costs what it holds, and gives it back."""
    config = target.config.model_copy(update={"head_dim": 64})
    cache = ContiguousCache(config, slots=64, capacity=8000)
    assert cache.bytes > 500e6
    before = _resident()
    slot = cache.allocate()
    assert cache.reserve([slot], 8000)
    for pool in (*cache.keys, *cache.values):
        pool.tensor[slot].fill_(1.0)
    assert _resident() - before == pytest.approx(cache.held_bytes, rel=0.1)
    cache.empty(slot)
    assert _resident() - before < 0.1 * cache.page_bytes * cache.pages


def test_keys_and_values_take_within_5_percent_of_what_the_config_says(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 sequences of 1,900 positions, by the cache's own count and by what the process holds."""
    monkeypatch.setattr("spire.model.cache.paging.PAGE", _PAGE)
    config = target.config.model_copy(update={"num_hidden_layers": 8})
    cache = ContiguousCache(config, slots=64, capacity=1900, dtype=torch.bfloat16)
    heads = config.num_key_value_heads * config.head_dim
    expected = 16 * 1900 * 2 * config.num_hidden_layers * heads * torch.bfloat16.itemsize
    before = _resident()
    slots = [cache.allocate() for _ in range(16)]
    assert cache.reserve(slots, 1900)
    for pool in (*cache.keys, *cache.values):
        for slot in slots:
            pool.tensor[slot, :, :1900].fill_(1.0)
    assert cache.held_bytes == pytest.approx(expected, rel=0.05)
    assert _resident() - before == pytest.approx(expected, rel=0.05)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
