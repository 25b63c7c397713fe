"""Pages: through any history of who comes, grows, is copied, rewound and goes, a slot reads what it has written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from spire.errors import OutOfCapacity
from spire.model.cache.paged import PagedCache
from spire.model.cache.paging import GPU_PAGE as PAGE
from spire.model.config import ModelConfig

SLOTS, PARKING, CAPACITY, BUDGET = 5, 3, 6 * PAGE - 1, 14

TINY = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
)


def new_cache(budget_pages: int = BUDGET) -> PagedCache:
    page_bytes = PagedCache(TINY, 1, CAPACITY).page_bytes
    cache = PagedCache(TINY, SLOTS, CAPACITY, parking=PARKING, budget=budget_pages * page_bytes)
    cache.pages_N2PGLK.fill_(torch.nan)  # whoever reads what he has not written will show it
    return cache


def append(cache: PagedCache, slot: int, values: list[int]) -> None:
    """Write one number a position to all layers and heads behind the committed positions, and commit them."""
    start = cache.lengths[slot]
    rows_1SG = cache.rows([slot], torch.arange(start, start + len(values))[None])
    for keys_RK, values_RK in cache.pools:
        keys_RK[rows_1SG[0]] = torch.tensor(values, dtype=torch.float32)[:, None, None]
        values_RK[rows_1SG[0]] = -torch.tensor(values, dtype=torch.float32)[:, None, None]
    cache.commit([slot], [len(values)])


def content(cache: PagedCache, slot: int) -> Tensor:
    """The numbers at a slot's committed positions, of all layers and heads, keys and values, [N, 2, S, G, K]."""
    rows_1SG = cache.rows([slot], torch.arange(cache.lengths[slot])[None])
    return torch.stack([torch.stack([pool_RK[rows_1SG[0]] for pool_RK in pair]) for pair in cache.pools])


class Histories(RuleBasedStateMachine):
    """Beside it a model: the numbers that each slot has, in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache()
        self.written: dict[int, list[int]] = {}
        self.next = 0

    @property
    def live(self) -> list[int]:
        return [slot for slot in self.written if slot < SLOTS]

    @precondition(lambda self: self.cache.free_slots)
    @rule()
    def begin(self) -> None:
        slot = self.cache.allocate()
        assert slot not in self.written
        self.written[slot] = []

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 3 * PAGE), rejected=st.integers(0, 20))
    def grow(self, data: st.DataObject, count: int, rejected: int) -> None:
        slot = data.draw(st.sampled_from(self.live))
        count = min(count, CAPACITY - self.cache.lengths[slot])
        if not self.cache.reserve([slot], count):
            return
        self.next += 1
        new = [self.next] * count
        append(self.cache, slot, new)
        kept = max(0, count - rejected)
        self.cache.rewind([slot], [self.cache.lengths[slot] - (count - kept)])
        self.written[slot] += new[:kept]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.live))
        length = data.draw(st.integers(0, self.cache.lengths[slot]))
        self.cache.rewind([slot], [length])
        del self.written[slot][length:]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.live))
        self.cache.free(slot)
        del self.written[slot]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Fork a prefix into a live slot, or park it."""
        source = data.draw(st.sampled_from(list(self.written)))
        others = [slot for slot in [*self.live, *range(SLOTS, SLOTS + PARKING)] if slot != source]
        target = data.draw(st.sampled_from(others)) if others else None
        if target is None:
            return
        length, free = data.draw(st.integers(0, len(self.written[source]))), self.cache.tables.free
        had = self.cache.tables.counts[target]
        self.cache.copy(source, target, length)
        assert had or self.cache.tables.free == free, "a copy takes no memory"
        self.written[target] = self.written[source][:length]

    @rule(place=st.integers(SLOTS, SLOTS + PARKING - 1))
    def shed(self, place: int) -> None:
        self.cache.empty(place)
        self.written.pop(place, None)

    @invariant()
    def every_slot_has_what_it_has_written(self) -> None:
        for slot, numbers in self.written.items():
            expected = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 2, 8)
            for keys, values in content(self.cache, slot):
                assert torch.equal(keys, expected)
                assert torch.equal(values, -expected)

    @invariant()
    def no_page_leaks(self) -> None:
        tables = self.cache.tables
        held = [tables.table_XP[slot, : tables.counts[slot]].tolist() for slot in range(SLOTS + PARKING)]
        live = {page for slot in range(SLOTS) for page in held[slot]}
        parked = {page for slot in range(SLOTS, SLOTS + PARKING) for page in held[slot]} - live
        assert (tables.live, tables.parked) == (len(live), len(parked))
        assert tables.free == BUDGET - len(live) - len(parked)
        assert self.cache.held_bytes == self.cache.live_bytes + self.cache.parked_bytes


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_two_sequences_of_one_prefix_hold_it_once() -> None:
    cache = new_cache()
    first, second = cache.allocate(), cache.allocate()
    assert cache.reserve([first], 2 * PAGE + 5)
    append(cache, first, [1] * (2 * PAGE + 5))
    cache.copy(first, second, 2 * PAGE + 5)
    assert cache.live_bytes == 3 * cache.page_bytes
    assert cache.reserve([first, second], 1)
    assert cache.live_bytes == 4 * cache.page_bytes, "the last page was begun, and one of the two writes to a copy"
    append(cache, first, [2])
    append(cache, second, [3])
    assert content(cache, first)[0, 0, -2:, 0, 0].tolist() == [1, 2]
    assert content(cache, second)[0, 0, -2:, 0, 0].tolist() == [1, 3]


def test_the_prefix_of_who_has_gone_stays_where_it_is_until_it_is_shed() -> None:
    cache = new_cache()
    slot = cache.allocate()
    assert cache.reserve([slot], 2 * PAGE)
    append(cache, slot, [7] * 2 * PAGE)
    cache.copy(slot, SLOTS, 2 * PAGE)
    assert (cache.live_bytes, cache.parked_bytes) == (2 * cache.page_bytes, 0), "the live one is charged"
    cache.free(slot)
    assert (cache.live_bytes, cache.parked_bytes) == (0, 2 * cache.page_bytes)
    cache.empty(SLOTS)
    assert cache.held_bytes == 0


def test_what_a_prompt_has_reserved_stays_so_when_its_prefix_is_copied() -> None:
    """Others took it: the next chunk of the prompt found no memory and failed a whole step."""
    cache = new_cache(budget_pages=10)
    donor, slot, other = (cache.allocate() for _ in range(3))
    assert cache.reserve([donor], 2 * PAGE + 5)
    append(cache, donor, [1] * (2 * PAGE + 5))
    assert cache.reserve([slot], 5 * PAGE)
    cache.copy(donor, slot, 2 * PAGE + 5)
    while cache.reserve([other], cache.tables.counts[other] * PAGE + 1):
        pass
    assert cache.reserve([slot], 5 * PAGE - (2 * PAGE + 5))
    append(cache, slot, [2] * (3 * PAGE - 5))
    assert cache.live_bytes == 10 * cache.page_bytes, "two pages are shared"
    assert content(cache, donor)[0, 0, :, 0, 0].tolist() == [1] * (2 * PAGE + 5)
    assert content(cache, slot)[0, 0, :, 0, 0].tolist() == [1] * (2 * PAGE + 5) + [2] * (3 * PAGE - 5)


def test_no_memory_for_a_copy_of_a_shared_page_is_no_memory() -> None:
    cache = new_cache(budget_pages=6)
    first, second = cache.allocate(), cache.allocate()
    assert cache.reserve([first], 5 * PAGE + 1)
    append(cache, first, [1] * (5 * PAGE + 1))
    cache.copy(first, second, 5 * PAGE + 1)
    assert not cache.reserve([second], 1)
    with pytest.raises(OutOfCapacity, match="no memory for 1 more positions"):
        cache.view([second], 1)
    assert cache.tables.counts[second] == 6
    cache.free(second)
    assert cache.reserve([first], 1)


def test_sequences_take_pages_as_they_grow_and_not_for_the_longest_context() -> None:
    cache = new_cache(budget_pages=6)
    slots = [cache.allocate() for _ in range(SLOTS)]
    assert cache.reserve(slots, 1)
    assert cache.live_bytes == SLOTS * cache.page_bytes
