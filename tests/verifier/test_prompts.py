"""Which prompts are prefilled next, and how much of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spire.model.cache import TargetCache
from tests.verifier.harness import TINY
from verifier_service.prompts import _PADDING, Prompts
from verifier_service.sequence import Sequence
from verifier_service.token_budget import TokenBudget

LONGEST = 400


def waiting(gateways_and_lengths: list[tuple[str, int]], budget: int) -> tuple[Prompts, list[Sequence]]:
    cache = TargetCache(TINY, len(gateways_and_lengths), LONGEST + _PADDING)
    prompts = Prompts(cache, TokenBudget(budget))
    sequences = []
    for gateway, length in gateways_and_lengths:
        start = SimpleNamespace(tokens=[1] * length, prompt_logprobs=False)
        prompt_L = torch.ones(length, dtype=torch.int64)
        sequence = SimpleNamespace(slot=cache.allocate(), gateway=gateway, start=start, prompt_L=prompt_L)
        sequences.append(cast(Sequence, sequence))
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
    assert whole.count(False) <= 1


def test_a_gateway_with_one_prompt_does_not_wait_for_the_many_of_another() -> None:
    prompts, sequences = waiting([("a", 300), ("a", 300), ("a", 300), ("b", 100)], budget=400)
    chosen, chunk = prompts.next_chunk(0)
    assert chunk
    assert chosen == [sequences[0], sequences[3]]
    assert chunk.last == [True, True]
