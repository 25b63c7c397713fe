"""What sampling computes for a GPU, whose numbers it does not wait for, is what it computes on a CPU."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from spire.decoding.sampling import SamplingRows, pick, probabilities, with_invariant
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import RULE_INVARIANT, Sampling
from tests.recorder import not_waiting, nothing_from_outside

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 7, 40, 1000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**63),
    rule=st.sampled_from([0, RULE_INVARIANT]),
)


def logits_of(rows: int, vocabulary: int, scale: float, seed: int) -> Tensor:
    """Rounded, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, 2, vocabulary, generator=generator)).mul(4).round() / 4


@settings(max_examples=150, deadline=None)
@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=5),
    vocabulary=st.sampled_from([10, 64, 700]),
    scale=st.sampled_from([0.0, 1.0, 6.0]),
    seed=st.integers(0, 2**31),
)
def test_truncation_keeps_the_same_tokens(samplings: list[Sampling], vocabulary: int, scale: float, seed: int) -> None:
    rows = from_protos(samplings)
    logits_BTV = logits_of(len(samplings), vocabulary, scale, seed)
    right = probabilities(logits_BTV.clone(), rows)
    mix = rows.mix
    with not_waiting(), nothing_from_outside():
        found = probabilities(logits_BTV.clone(), rows.with_mix(mix))
    assert torch.equal(found > 0, right > 0)
    torch.testing.assert_close(found, right)


@settings(max_examples=100, deadline=None)
@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=5),
    vocabulary=st.sampled_from([10, 700, 40_000]),
    scale=st.sampled_from([0.0, 1.0, 6.0]),
    seed=st.integers(0, 2**31),
)
def test_picks_are_the_same(samplings: list[Sampling], vocabulary: int, scale: float, seed: int) -> None:
    """A flat distribution over 40,000 tokens has rare ones alone."""
    rows: SamplingRows = from_protos(samplings)
    probs_BV = logits_of(len(samplings), vocabulary, scale, seed)[:, 0].softmax(dim=-1)
    position_B = torch.arange(len(samplings)) + seed % 1000
    ids_B = torch.zeros(len(samplings), dtype=torch.int64)
    right, some = pick(probs_BV, rows, position_B), with_invariant(ids_B, probs_BV, rows, position_B)
    with not_waiting(), nothing_from_outside():
        assert torch.equal(pick(probs_BV, rows, position_B), right)
        assert torch.equal(with_invariant(ids_B, probs_BV, rows, position_B), some)
