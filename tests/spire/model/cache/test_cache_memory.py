"""The cache's accounts: memory is who holds it now, through any history of who comes, grows, goes and is parked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spire.errors import OutOfCapacity
from spire.model.cache import paging
from spire.model.cache.contiguous import ContiguousCache
from spire.model.config import ModelConfig

SLOTS, PARKING, CAPACITY, BUDGET = 6, 3, 10 * paging.PAGE, 20

TINY = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
)


def new_cache(budget_pages: int = BUDGET, slots: int = SLOTS) -> ContiguousCache:
    page_bytes = ContiguousCache(TINY, 1, CAPACITY).page_bytes
    return ContiguousCache(TINY, slots, CAPACITY, parking=PARKING, budget=budget_pages * page_bytes)


def pages_of(length: int) -> int:
    return min(-(-length // paging.PAGE), -(-CAPACITY // paging.PAGE) + 1)


class Accounts(RuleBasedStateMachine):
    """Beside it a model: who is charged how many pages, and what each has written."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache()
        self.charged: dict[int, int] = {}
        self.written: dict[int, float] = {}
        self.lives = 0.0

    @property
    def live(self) -> list[int]:
        return [slot for slot in self.charged if slot < SLOTS]

    @precondition(lambda self: self.cache.free_slots)
    @rule()
    def begin(self) -> None:
        slot = self.cache.allocate()
        assert slot not in self.charged
        self.charged[slot] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5 * paging.PAGE))
    def grow(self, data: st.DataObject, count: int) -> None:
        slot = data.draw(st.sampled_from(self.live))
        length = self.cache.lengths[slot]
        count = min(count, CAPACITY - length)
        wanted = max(self.charged[slot], pages_of(length + count))
        fits = sum(self.charged.values()) - self.charged[slot] + wanted <= BUDGET
        assert self.cache.reserve([slot], count) == fits
        if fits:
            self.charged[slot] = wanted
            self.lives += 1
            value = self.written.setdefault(slot, self.lives)
            for pool in (*self.cache.keys, *self.cache.values):
                pool.tensor[slot, :, length : length + count] = value
            self.cache.commit([slot], [count])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.live))
        self.cache.free(slot)
        self.charged.pop(slot)
        self.written.pop(slot, None)

    @precondition(lambda self: any(self.cache.lengths[slot] for slot in self.live))
    @rule(data=st.data(), place=st.integers(SLOTS, SLOTS + PARKING - 1))
    def park(self, data: st.DataObject, place: int) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.live if self.cache.lengths[slot]]))
        wanted = max(self.charged.get(place, 0), pages_of(self.cache.lengths[slot]))
        if sum(self.charged.values()) - self.charged.get(place, 0) + wanted > BUDGET:
            with pytest.raises(OutOfCapacity):
                self.cache.copy(slot, place, self.cache.lengths[slot])
            return
        self.cache.copy(slot, place, self.cache.lengths[slot])
        self.charged[place], self.written[place] = wanted, self.written[slot]

    @rule(place=st.integers(SLOTS, SLOTS + PARKING - 1))
    def shed(self, place: int) -> None:
        self.cache.empty(place)
        self.charged.pop(place, None)
        self.written.pop(place, None)

    @invariant()
    def everybody_is_charged_what_he_has_and_nobody_for_who_has_gone(self) -> None:
        pages = self.cache.page_bytes
        assert self.cache.live_bytes == sum(self.charged[slot] for slot in self.live) * pages
        assert self.cache.parked_bytes == sum(n for slot, n in self.charged.items() if slot >= SLOTS) * pages

    @invariant()
    def no_more_is_in_memory_than_the_budget(self) -> None:
        charged = sum(self.charged.values()) * self.cache.page_bytes
        assert charged <= self.cache.held_bytes <= self.cache.bytes

    @invariant()
    def nobody_loses_what_he_has_written(self) -> None:
        for slot, value in self.written.items():
            length = self.cache.lengths[slot]
            for pool in (*self.cache.keys, *self.cache.values):
                assert (pool.tensor[slot, :, :length] == value).all()


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.fault(32)
def test_who_follows_a_long_sequence_is_charged_for_himself_alone() -> None:
    """Four long sequences have ended: as many short ones as before them run together."""
    cache = new_cache(budget_pages=48, slots=48)
    long = [cache.allocate() for _ in range(4)]
    assert cache.reserve(long, CAPACITY)
    for slot in long:
        cache.free(slot)
    assert cache.usage == 0
    assert all(cache.reserve([cache.allocate()], paging.PAGE) for _ in range(48))


def test_memory_of_who_has_gone_is_taken_no_more_than_is_needed() -> None:
    cache = new_cache()
    gone, other = cache.allocate(), cache.allocate()
    assert cache.reserve([gone], 10 * paging.PAGE)
    cache.free(gone)
    assert cache.reserve([other], 10 * paging.PAGE)
    assert cache.held_bytes == 20 * cache.page_bytes, "there was enough for both"
    third = next(slot for slot in iter(cache.allocate, None) if slot != gone)
    assert cache.reserve([third], paging.PAGE)
    assert cache._held[gone] == 9


def test_half_of_the_cache_may_be_parked() -> None:
    cache = new_cache()
    slot = cache.allocate()
    assert cache.reserve([slot], 6 * paging.PAGE)
    assert cache.may_park(SLOTS, 6 * paging.PAGE)
    cache.copy(slot, SLOTS, 6 * paging.PAGE)
    assert cache.may_park(SLOTS, 10 * paging.PAGE), "what is there is written over"
    assert cache.may_park(SLOTS + 1, 4 * paging.PAGE)
    assert not cache.may_park(SLOTS + 1, 4 * paging.PAGE + 1)


@pytest.mark.fault(32)
def test_what_is_scrubbed_takes_no_memory_that_was_not_held() -> None:
    cache = ContiguousCache(TINY, 1, CAPACITY)
    slot = cache.allocate()
    assert cache.reserve([slot], 1)
    pool = cache.keys[0].tensor
    pool[slot, :, :1] = torch.nan
    pool[slot, :, 2 * paging.PAGE] = 7.0  # nobody holds it, so that nobody reads it
    cache.free(slot, scrub=True)
    assert (pool[slot, :, :1] == 0).all()
    assert (pool[slot, :, 2 * paging.PAGE] == 7.0).all()
