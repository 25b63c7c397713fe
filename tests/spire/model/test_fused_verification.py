"""Verification by a kernel of ours comes to the verdicts that the rules written in torch come to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import spire.model.backends.cpu.fused_verification
from spire.decoding.sampling import Rule, SamplingRows, pick, probabilities, with_invariant
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
        assert judges(logits_BTV.shape[-1], draft_BK, counts_B, q, rows)  # type: ignore[arg-type]
        verdict, finite_B = judge(logits_BTV.clone(), *arguments)  # type: ignore[arg-type]
        real_BT = torch.arange(logits_BTV.shape[1]) <= counts_B[:, None]  # type: ignore[index]
        packed, finite_as_packed_B = judge(logits_BTV[real_BT], *arguments)  # type: ignore[arg-type]
        assert torch.equal(packed.accepted_B, verdict.accepted_B)
        assert torch.equal(packed.tokens_BT, verdict.tokens_BT)
        assert torch.equal(finite_as_packed_B, finite_B)
        return verdict, finite_B


some_truncation = st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.5}])


def truncated(rows: SamplingRows, truncations: list[dict[str, float]]) -> SamplingRows:
    return replace(
        rows,
        top_k_B=torch.tensor([int(truncation.get("top_k", 0)) for truncation in truncations]),
        top_p_B=torch.tensor([truncation.get("top_p", 1.0) for truncation in truncations]),
        min_p_B=torch.tensor([truncation.get("min_p", 0.0) for truncation in truncations]),
    )


@each_kernels
@settings(max_examples=150, deadline=None, derandomize=True)  # by chance one in a million draws is another
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.3]), min_size=9, max_size=9),
    rules=st.lists(st.sampled_from([*Rule]), min_size=9, max_size=9),
    truncations=st.lists(some_truncation, min_size=9, max_size=9),
    agreement=st.sampled_from([0.0, 0.5, 0.9]),
    own_vocabulary=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_it_comes_to_the_same_verdict(
    kernels: Kernels,
    counts: list[int],
    temperatures: list[float],
    rules: list[Rule],
    truncations: list[dict[str, float]],
    agreement: float,
    own_vocabulary: bool,
    seed: int,
) -> None:
    """Also where the draft can propose only some tokens, and q is of these."""
    B, K, generator = len(counts), max(counts), torch.Generator().manual_seed(seed)
    rows = replace(
        truncated(sampled_rows(B), truncations[:B]),
        temperature_B=torch.tensor(temperatures[:B]),
        seed_B=torch.arange(B) + seed,
        rule_B=torch.tensor(rules[:B]),
    )
    logits_BTV, base_B = 2 * torch.randn(B, K + 1, V, generator=generator), torch.arange(B) * 7
    guessed_BKV = agreement * logits_BTV[:, :K] + (1 - agreement) * torch.randn(B, K, V, generator=generator)
    vocabulary_M = torch.randperm(V, generator=generator)[: V // 2 if own_vocabulary else V].sort().values
    guessed_BKV = torch.full_like(guessed_BKV, -torch.inf).index_copy_(2, vocabulary_M, guessed_BKV[..., vocabulary_M])
    exact_BKV = probabilities(guessed_BKV.clone(), rows)
    q_BKV, draft_BK = exact_BKV.bfloat16(), torch.zeros(B, K, dtype=torch.int64)
    for k in range(K):
        drawn_B = q_BKV[:, k].float().multinomial(1, generator=generator)[:, 0]
        draft_BK[:, k] = with_invariant(drawn_B, exact_BKV[:, k], rows, base_B + k + 1)
    of_rows = [q_BKV[row, :count][:, vocabulary_M] if count else None for row, count in enumerate(counts)]
    q = collected(of_rows, K, len(vocabulary_M)) if K else None
    if q and own_vocabulary:
        q = replace(q, vocabulary_M=vocabulary_M)
    given = (draft_BK, torch.tensor(counts), q, rows, base_B)
    found, finite_B = judged(kernels, logits_BTV, *given)
    expected = verify(probabilities(logits_BTV.clone(), rows), *given)
    assert finite_B.all()
    assert torch.equal(found.accepted_B, expected.accepted_B)
    # Behind the token after those accepted, the tokens mean nothing.
    for row, accepted in enumerate(expected.accepted_B.tolist()):
        assert torch.equal(found.tokens_BT[row, : accepted + 1], expected.tokens_BT[row, : accepted + 1])


@each_kernels
@settings(max_examples=40, deadline=None, derandomize=True)
@given(vocabulary=st.sampled_from([32, 96, 49_152]), spread=st.sampled_from([0.0, 1.0, 4.0]), seed=st.integers(0, 99))
def test_common_and_rare_tokens_are_picked_by_the_noise_of_torch(
    kernels: Kernels, vocabulary: int, spread: float, seed: int
) -> None:
    """Without any spread all 49,152 tokens are rare."""
    logits_BTV = spread * torch.randn(32, 1, vocabulary, generator=torch.Generator().manual_seed(seed))
    rows, base_B = sampled_rows(32, rule=Rule.INVARIANT), 1000 * torch.arange(32) + seed
    nothing = (torch.empty(32, 0, dtype=torch.int64), torch.zeros(32, dtype=torch.int64), None)
    found, _ = judged(kernels, logits_BTV, *nothing, rows, base_B)
    assert torch.equal(found.tokens_BT[:, 0], pick(logits_BTV[:, 0].softmax(dim=-1), rows, base_B + 1))


@each_kernels
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    vocabulary=st.sampled_from([32, 4096, 49_152]),
    spread=st.sampled_from([0.5, 2.0, 8.0]),
    top_k=st.sampled_from([0, 1, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 1.0]),
    seed=st.integers(0, 99),
)
def test_what_truncation_leaves_is_what_torch_leaves(
    kernels: Kernels, vocabulary: int, spread: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """The kernel overwrites logits by the shares that the token is drawn from."""
    logits_BTV = spread * torch.randn(4, 1, vocabulary, generator=torch.Generator().manual_seed(seed))
    rows = truncated(sampled_rows(4), [{"top_k": top_k, "top_p": top_p, "min_p": min_p}] * 4)
    expected_BTV, left_BTV = probabilities(logits_BTV.clone(), rows), logits_BTV.clone()
    nothing = (torch.empty(4, 0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spire.model.backends.cpu.fused_verification, "every_kernels", lambda: (kernels,))
        judge(left_BTV, *nothing, rows, torch.zeros(4, dtype=torch.int64))
    found_BTV = left_BTV / left_BTV.sum(dim=-1, keepdim=True)
    # Where 49,152 probabilities sum to top_p, and at min_p, the last bit decides on a token of 3e-7.
    torch.testing.assert_close(found_BTV, expected_BTV, rtol=1e-5, atol=1e-6)
    assert ((left_BTV > 0) != (expected_BTV > 0)).sum(dim=-1).max() <= 1


@each_kernels
def test_of_equally_probable_tokens_those_with_lower_ids_are_kept(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spire.model.backends.cpu.fused_verification, "every_kernels", lambda: (kernels,))
    left_BTV, none_B = torch.zeros(1, 1, V), torch.zeros(1, dtype=torch.int64)
    judge(left_BTV, none_B[:, None][:, :0], none_B, None, truncated(sampled_rows(1), [{"top_k": 3}]), none_B)
    assert left_BTV[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2]


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
    twos_B, zeros_B = torch.full((2,), 2), torch.zeros(2, dtype=torch.int64)
    draft_BK, none_BK = torch.zeros(2, 2, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int64)
    assert judges(V, draft_BK, twos_B, q, sampled_rows(2))
    assert judges(V, draft_BK, twos_B, None, sampled_rows(2, temperature=0.0))
    assert not judges(V, draft_BK, twos_B, None, sampled_rows(2)), "q is one-hot"
    assert not judges(V, draft_BK, twos_B, SparseDistribution(None, q.probs_BKM.float()), sampled_rows(2)), (
        "in another type"
    )
    assert not judges(V, draft_BK, twos_B, q, sampled_rows(2, temperature=1e-5)), "divided logits might be infinite"
    assert judges(V, draft_BK, twos_B, q, sampled_rows(2, rule=Rule.BLOCK))
    assert judges(V, draft_BK, twos_B, None, sampled_rows(2, rule=Rule.INVARIANT)), "this rule needs no q"
    assert judges(V, none_BK, zeros_B, None, sampled_rows(2)), "nothing was drafted"
    assert not judges(V + 1, draft_BK, twos_B, q, sampled_rows(2)), "a vocabulary that no vector divides"
    mixed = replace(sampled_rows(2), rule_B=torch.tensor([Rule.REJECTION, Rule.INVARIANT]))
    assert judges(V, draft_BK, torch.tensor([0, 2]), None, mixed), "nothing is judged by q"
    assert not judges(V, draft_BK, torch.tensor([2, 0]), None, mixed)


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
