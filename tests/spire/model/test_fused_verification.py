"""Rejection and block verification by a kernel of ours come to the verdicts that the rules written in torch come to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import spire.model.backends.cpu.fused_verification
from spire.decoding.sampling import Rule, SamplingRows, probabilities
from spire.decoding.verification import Q_PROBLEMS, SparseDistribution, Verdict, check_q, verify
from spire.kernels import Kernels, every_kernels
from spire.model.backends.cpu.fused_verification import judge, judges
from tests.spire.decoding.test_verification import sampled_rows
from tests.spire.model.test_fused_layer import each_kernels

pytestmark = pytest.mark.skipif(not every_kernels(), reason="no compiler at installation, or none for this processor")
V = 64


def collected(rows_KV: list[Tensor | None], K: int, vocabulary: int = V) -> SparseDistribution:
    return SparseDistribution.whole(rows_KV, K, vocabulary, torch.device("cpu"))


def judged(kernels: Kernels, logits_BTV: Tensor, *arguments: object) -> tuple[Verdict, Tensor]:
    """By these kernels, which must judge logits without padding alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spire.model.backends.cpu.fused_verification, "every_kernels", lambda: (kernels,))
        draft_BK, counts_B, q, rows, _ = arguments
        assert judges(logits_BTV.shape[-1], draft_BK, q, rows)  # type: ignore[arg-type]
        verdict, finite_B = judge(logits_BTV.clone(), *arguments)  # type: ignore[arg-type]
        real_BT = torch.arange(logits_BTV.shape[1]) <= counts_B[:, None]  # type: ignore[index]
        packed, finite_as_packed_B = judge(logits_BTV[real_BT], *arguments)  # type: ignore[arg-type]
        assert torch.equal(packed.accepted_B, verdict.accepted_B)
        assert torch.equal(packed.tokens_BT, verdict.tokens_BT)
        assert torch.equal(finite_as_packed_B, finite_B)
        return verdict, finite_B


@each_kernels
@settings(max_examples=150, deadline=None, derandomize=True)  # by chance one in a million draws is another
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.3]), min_size=9, max_size=9),
    rules=st.lists(st.sampled_from([Rule.REJECTION, Rule.BLOCK]), min_size=9, max_size=9),
    agreement=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 10_000),
)
def test_it_comes_to_the_same_verdict(
    kernels: Kernels, counts: list[int], temperatures: list[float], rules: list[Rule], agreement: float, seed: int
) -> None:
    B, K, generator = len(counts), max(counts), torch.Generator().manual_seed(seed)
    rows = replace(
        sampled_rows(B),
        temperature_B=torch.tensor(temperatures[:B]),
        seed_B=torch.arange(B) + seed,
        rule_B=torch.tensor(rules[:B]),
    )
    logits_BTV = 2 * torch.randn(B, K + 1, V, generator=generator)
    guessed_BKV = agreement * logits_BTV[:, :K] + (1 - agreement) * torch.randn(B, K, V, generator=generator)
    q_BKV = guessed_BKV.softmax(dim=-1).bfloat16()
    draft_BK = torch.zeros(B, K, dtype=torch.int64)
    for row, count in enumerate(counts):
        for k in range(count):
            greedy = temperatures[row] == 0
            draft_BK[row, k] = (
                guessed_BKV[row, k].argmax() if greedy else q_BKV[row, k].float().multinomial(1, generator=generator)[0]
            )
    q = collected([q_BKV[row, :count] if count else None for row, count in enumerate(counts)], K) if K else None
    given = (draft_BK, torch.tensor(counts), q, rows, torch.arange(B) * 7)
    found, finite_B = judged(kernels, logits_BTV, *given)
    expected = verify(probabilities(logits_BTV.clone(), rows), *given)
    assert finite_B.all()
    assert torch.equal(found.accepted_B, expected.accepted_B)
    assert torch.equal(found.tokens_BT, expected.tokens_BT)


@each_kernels
def test_exponentials_are_as_exact_as_float32(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what a draw leaves of its logits, and those of attention and gates too."""
    monkeypatch.setattr(spire.model.backends.cpu.fused_verification, "every_kernels", lambda: (kernels,))
    logits_B1V = -torch.linspace(0, 80, 4096)[None, None]
    left_B1V, none_B = logits_B1V.clone(), torch.zeros(1, dtype=torch.int64)
    judge(left_B1V, torch.empty(1, 0, dtype=torch.int64), none_B, None, sampled_rows(1), none_B)
    error_V = (left_B1V.double().log() - logits_B1V.double()).abs()
    assert (error_V <= 3e-7 + 2.0**-23 * logits_B1V.abs()).all()


@each_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logits_are_found_in_their_row_except_in_padding(kernels: Kernels, value: float) -> None:
    logits_BTV, counts_B = torch.randn(4, 4, V), torch.tensor([3, 3, 1, 0])
    logits_BTV[1, 3, 9] = logits_BTV[2, 2, 9] = logits_BTV[3, 1, 9] = value
    q = collected([torch.full((int(k), V), 1 / V).bfloat16() if k else None for k in counts_B], 3)
    draft_BK = torch.zeros(4, 3, dtype=torch.int64)
    _, finite_B = judged(kernels, logits_BTV, draft_BK, counts_B, q, sampled_rows(4), torch.zeros_like(counts_B))
    assert finite_B.tolist() == [1, 0, 1, 1]


def test_only_what_it_can_judge_is_left_to_it() -> None:
    q = collected([torch.full((2, V), 1 / V).bfloat16()] * 2, 2)
    draft_BK, none_BK = torch.zeros(2, 2, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64)

    def truncated(rows: SamplingRows) -> SamplingRows:
        return replace(rows, top_p_B=torch.tensor([1.0, 0.9]))

    assert judges(V, draft_BK, q, sampled_rows(2))
    assert judges(V, draft_BK, None, sampled_rows(2, temperature=0.0))
    assert not judges(V, draft_BK, None, sampled_rows(2)), "q is one-hot"
    assert not judges(V, draft_BK, SparseDistribution(None, q.probs_BKM.float()), sampled_rows(2)), "in another type"
    assert not judges(V, draft_BK, q, truncated(sampled_rows(2)))
    assert judges(V, draft_BK, q, sampled_rows(2, rule=Rule.BLOCK))
    assert not judges(V, draft_BK, q, sampled_rows(2, rule=Rule.INVARIANT))
    assert not judges(V, none_BK, None, sampled_rows(2, rule=Rule.INVARIANT))
    assert judges(V, draft_BK, None, sampled_rows(2, rule=Rule.INVARIANT, temperature=0.0)), "greedy by any rule"
    assert judges(V, none_BK, None, sampled_rows(2)), "nothing was drafted"
    assert not judges(V + 1, draft_BK, q, sampled_rows(2)), "a vocabulary that no vector divides"


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=9), vocabulary=st.sampled_from([16, 48, 4096]))
def test_q_is_collected_with_its_sums_and_least_numbers(counts: list[int], vocabulary: int) -> None:
    K = max(counts)
    rows_KV = [torch.randn(count, vocabulary).bfloat16() if count else None for count in counts]
    q = collected(rows_KV, K, vocabulary)
    expected_BKV = torch.zeros(len(counts), K, vocabulary)
    for row, rows in enumerate(rows_KV):
        if rows is not None:
            expected_BKV[row, : len(rows)] = rows
    assert torch.equal(q.probs_BKM.float(), expected_BKV)
    torch.testing.assert_close(q.sum_BK, expected_BKV.sum(dim=-1), rtol=1e-5, atol=1e-4)
    if K:
        assert torch.equal(q.least_BK, expected_BKV.amin(dim=-1))


@pytest.mark.parametrize(
    ("value", "problem"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (-0.25, "negative")]
)
def test_a_wrong_number_of_a_collected_q_is_found_in_its_row_only(value: float, problem: str) -> None:
    rows_KV = [torch.full((2, 16), 1 / 16).bfloat16() for _ in range(3)]
    rows_KV[1][1, 5] = value
    q = collected([*rows_KV], 2, 16)
    draft_BK, counts_B, widths_B = torch.zeros(3, 2, dtype=torch.int64), torch.full((3,), 2), torch.full((3,), 16)
    found = [Q_PROBLEMS[number] for number in check_q(q, draft_BK, counts_B, widths_B, 16).tolist()]
    assert problem in found[1]
    assert (found[0], found[2]) == ("", "")
