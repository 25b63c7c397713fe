"""Which prompts are prefilled next, and how much of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings, strategies as st

from spire.model.cache.contiguous import ContiguousCache
from tests.verifier_service.harness import TINY
from verifier_service.engine.prompts import _PADDING, Prompts, TokenBudget
from verifier_service.engine.sequence import HeldSequence

LONGEST = 400


def waiting(gateways_and_lengths: list[tuple[str, int]], budget: int) -> tuple[Prompts, list[HeldSequence]]:
    longest = max(length for _, length in gateways_and_lengths)
    cache = ContiguousCache(TINY, len(gateways_and_lengths), longest + _PADDING)
    prompts = Prompts(cache, TokenBudget(budget))
    sequences = []
    for gateway, length in gateways_and_lengths:
        start = SimpleNamespace(tokens=[1] * length, prompt_logprobs=False)
        prompt_L = torch.ones(length, dtype=torch.int64)
        sequence = SimpleNamespace(slot=cache.allocate(), gateway=gateway, start=start, prompt_L=prompt_L)
        sequence.before_copy = 0
        sequences.append(cast(HeldSequence, sequence))
        prompts.add(sequences[-1])
    return prompts, sequences


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, LONGEST)), min_size=1, max_size=12),
    st.integers(64, 512),
    st.integers(0, 512),
)
def test_a_chunk_fills_its_room_and_nobody_waits_beside_empty_places(
    gateways_and_lengths: list[tuple[str, int]], budget: int, taken: int
) -> None:
    prompts, sequences = waiting(gateways_and_lengths, budget)
    room = max(budget - taken, -(-budget // 4))
    chosen, chunk = prompts.next_chunk(taken)
    assert chunk
    padded = [tokens_BT.numel() for _, tokens_BT in chunk.rectangles()]
    assert sum(padded) <= room
    assert sum(padded) == room or len(chosen) == len(sequences)
    assert sum(padded) - sum(chunk.counts) <= _PADDING * len(chosen)
    whole = [len(sequence.prompt_L) == count for sequence, count in zip(chosen, chunk.counts, strict=True)]
    assert whole == chunk.last
    assert whole.count(False) <= 2


def rounds_until_read(prompts: Prompts, cache: ContiguousCache, wanted: HeldSequence) -> int:
    """Steps until this prompt is whole."""
    for steps in range(1, 1000):
        chosen, chunk = prompts.next_chunk(0)
        assert chunk
        cache.commit(chunk.slots, chunk.counts)
        for sequence, last in zip(chosen, chunk.last, strict=True):
            if last:
                prompts.remove(sequence)
        if wanted in chosen and wanted not in prompts._waiting:
            return steps
    raise AssertionError("it is never read")


def test_a_gateway_with_one_prompt_does_not_wait_for_the_many_of_another() -> None:
    prompts, sequences = waiting([("a", 300), ("a", 300), ("a", 300), ("b", 100)], budget=400)
    chosen, chunk = prompts.next_chunk(0)
    assert chunk
    assert chosen == [sequences[3], sequences[0]]
    assert chunk.last == [True, True]


@pytest.mark.fault(30)
def test_a_short_prompt_is_read_within_a_step_or_two_beside_a_long_one() -> None:
    prompts, (long, short) = waiting([("a", 7000), ("a", 10)], budget=512)
    assert rounds_until_read(prompts, prompts._cache, short) <= 2
    assert rounds_until_read(prompts, prompts._cache, long) <= 7000 // 512 + 1


@pytest.mark.fault(30)
def test_a_long_prompt_is_read_at_half_speed_or_more_beside_any_short_ones() -> None:
    prompts, (long, *_) = waiting([("a", 4000)] + [("a", 300)] * 40, budget=512)
    assert rounds_until_read(prompts, prompts._cache, long) <= 4000 // 256 + 1


@pytest.mark.fault(29)
@settings(deadline=None)
@given(st.lists(st.integers(1, LONGEST), min_size=2, max_size=12), st.integers(16, 512))
def test_of_prompts_of_one_length_the_older_is_read_first(lengths: list[int], budget: int) -> None:
    prompts, sequences = waiting([("a", length) for length in lengths], budget)
    done: list[HeldSequence] = []
    while prompts:
        chosen, chunk = prompts.next_chunk(0)
        assert chunk
        prompts._cache.commit(chunk.slots, chunk.counts)
        read = [sequence for sequence, last in zip(chosen, chunk.last, strict=True) if last]
        for sequence in read:
            prompts.remove(sequence)
        # Those of one step are answered by age.
        done += sorted(read, key=sequences.index)
    for length in set(lengths):
        order = [sequences.index(one) for one in done if len(one.prompt_L) == length]
        assert order == sorted(order)
