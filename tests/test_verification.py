"""The rejection rule is lossless: what comes out is distributed as the target says, whatever the draft says.

Each test of a distribution has a control: a rule that is not lossless fails it. Thresholds come from chi-square's
distribution at a false alarm rate of one in a million; numbers are fixed, so a test fails always or never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from spire.sampling import Purpose, SamplingRows, draw, top_m
from spire.verification import Q_PROBLEMS, SparseDistribution, Verdict, check_q, verify

ALPHA = 1e-6
Rule = Callable[[Tensor, Tensor, Tensor, SparseDistribution | None, SamplingRows, Tensor], Verdict]


def sampled_rows(count: int, temperature: float = 1.0) -> SamplingRows:
    """One sequence per row: its seed is its number."""
    zeros = torch.zeros(count, dtype=torch.int64)
    return SamplingRows(torch.full((count,), temperature), zeros, torch.ones(count), torch.arange(count), zeros)


def accept_everything(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution | None, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    """The lossy rule that must fail."""
    last_B = draw(p_BTV[:, -1], rows.uniform(base_B + counts_B + 1, Purpose.SAMPLE))
    return Verdict(counts_B, torch.cat((draft_BK, last_B[:, None]), dim=1))


def accept_typical(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution | None, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    """Typical acceptance of one token: it stands when p(x) passes a threshold that depends on p's entropy."""
    p_BV = p_BTV[:, 0]
    entropy_B = -(p_BV * p_BV.clamp(min=1e-30).log()).sum(-1)
    threshold_B = torch.minimum(torch.tensor(0.09), 0.3 * (-entropy_B).exp())
    accepted_B = (p_BV.gather(1, draft_BK[:, :1]).squeeze(1) > threshold_B).long()
    drawn_B = draw(p_BV, rows.uniform(base_B + 1, Purpose.SAMPLE))
    first_B = torch.where(accepted_B == 1, draft_BK[:, 0], drawn_B)
    return Verdict(accepted_B, torch.stack((first_B, drawn_B), dim=1))


def tokens_of(rule: Rule, p_VV: Tensor, q_VV: Tensor, n: int, k: int, m: int = 16) -> Tensor:
    """n independent sequences of a chain: the next token depends on the last one alone. Returns [n, k + 1], -1 unset.

    Each starts after token 0; the draft draws from the m most probable tokens of its own chain, as the service does.
    """
    rows, base_B = sampled_rows(n), torch.full((n,), 5)
    last_B, draft, ids, probs = torch.zeros(n, dtype=torch.int64), [], [], []
    for step in range(k):
        ids_BM, probs_BM = top_m(q_VV[last_B], m)
        at_B = draw(probs_BM, rows.uniform(base_B + step + 1, Purpose.DRAFT))
        last_B = ids_BM.gather(1, at_B[:, None]).squeeze(1)
        draft.append(last_B)
        ids.append(ids_BM)
        probs.append(probs_BM)
    draft_BK = torch.stack(draft, dim=1)
    fed_BT = torch.cat((torch.zeros(n, 1, dtype=torch.int64), draft_BK), dim=1)
    q = SparseDistribution(torch.stack(ids, dim=1), torch.stack(probs, dim=1))
    verdict = rule(p_VV[fed_BT], draft_BK, torch.full((n,), k), q, rows, base_B)
    real = torch.arange(k + 1) <= verdict.accepted_B[:, None]
    return torch.where(real, verdict.tokens_BT, -1)


def p_value(tokens_N: Tensor, p_V: Tensor) -> float:
    expected = p_V.double() / p_V.double().sum() * len(tokens_N)
    return float(stats.chisquare(tokens_N.bincount(minlength=len(p_V)).numpy(), expected.numpy()).pvalue)


def first_token_p_value(rule: Rule, p_VV: Tensor, q_VV: Tensor, n: int, m: int = 16) -> float:
    return p_value(tokens_of(rule, p_VV, q_VV, n, k=1, m=m)[:, 0], p_VV[0])


def chain(seed: int, V: int = 16) -> Tensor:
    return (torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.2).softmax(-1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("m", [2, 16])
def test_the_first_token_follows_p(seed: int, m: int) -> None:
    """Also when q is truncated to a few tokens: it is still exactly what the draft drew from."""
    assert first_token_p_value(verify, chain(seed), chain(seed + 100), 50_000, m) > ALPHA


def test_an_anti_correlated_draft_does_not_bend_the_output() -> None:
    """Vocabulary 16, the draft's distribution is the target's reversed: shared randomness would show here."""
    p_V = torch.arange(1, 17) / 136
    p_VV = p_V.expand(16, 16)
    assert first_token_p_value(verify, p_VV, p_VV.flip(1), 200_000) > ALPHA


@pytest.mark.parametrize("lossy", [accept_everything, accept_typical])
def test_lossy_rules_fail_the_same_test(lossy: Rule) -> None:
    p_VV = (torch.arange(1, 17) / 136).expand(16, 16)
    assert first_token_p_value(lossy, p_VV, p_VV.flip(1), 200_000) < ALPHA
    assert first_token_p_value(lossy, chain(0), chain(100), 50_000) < ALPHA


def test_sharing_randomness_between_draft_and_verifier_fails_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    p_VV = (torch.arange(1, 17) / 136).expand(16, 16)
    plain = SamplingRows.uniform
    monkeypatch.setattr(SamplingRows, "uniform", lambda rows, position, _: plain(rows, position, Purpose.DRAFT))
    assert first_token_p_value(verify, p_VV, p_VV.flip(1), 200_000) < ALPHA


def joint_p_value(rule: Rule, n: int) -> float:
    """Pairs of the first two tokens, over sequences that run until they have two."""
    p_VV, q_VV = chain(1, 6), chain(2, 6)
    tokens_BT = tokens_of(rule, p_VV, q_VV, n, k=3, m=6)
    second_B = torch.where(tokens_BT[:, 1] >= 0, tokens_BT[:, 1], _next_round(p_VV, tokens_BT[:, 0], n))
    pairs_B = tokens_BT[:, 0] * 6 + second_B
    return p_value(pairs_B, (p_VV[0][:, None] * p_VV).flatten())


def _next_round(p_VV: Tensor, newest_B: Tensor, n: int) -> Tensor:
    """One plain round after a round that gave a single token: k = 0 at base + 1."""
    none_BK = torch.zeros(n, 0, dtype=torch.int64)
    zeros_B = torch.zeros(n, dtype=torch.int64)
    verdict = verify(p_VV[newest_B][:, None], none_BK, zeros_B, None, sampled_rows(n), torch.full((n,), 6))
    return verdict.tokens_BT[:, 0]


def test_two_tokens_jointly_follow_p_over_round_boundaries() -> None:
    assert joint_p_value(verify, 100_000) > ALPHA
    assert joint_p_value(accept_everything, 100_000) < ALPHA


def test_acceptance_is_the_overlap_of_p_and_q() -> None:
    """The mean of n indicators is within 5.5 standard deviations of its expectation, sum of min(p, q)."""
    n, p_VV, q_VV = 50_000, chain(1), chain(2)
    accepted = (tokens_of(verify, p_VV, q_VV, n, k=1)[:, 1] >= 0).double().mean()
    overlap = float(torch.minimum(p_VV[0], q_VV[0]).sum())
    assert abs(accepted - overlap) < 5.5 * (overlap * (1 - overlap) / n) ** 0.5


def test_rows_of_different_depth_do_not_touch_each_other() -> None:
    """A ragged batch gives every row what it gets alone; padding is arbitrary."""
    generator = torch.Generator().manual_seed(0)
    B, K, V, M = 12, 4, 20, 5
    p_BTV = torch.randn(B, K + 1, V, generator=generator).softmax(-1)
    ids_BKM, probs_BKM = (x.view(B, K, M) for x in top_m(torch.randn(B * K, V, generator=generator).softmax(-1), M))
    draft_BK = ids_BKM[..., 1]
    counts_B = torch.arange(B) % (K + 1)
    rows, base_B = sampled_rows(B), torch.arange(B) * 3
    together = verify(p_BTV, draft_BK, counts_B, SparseDistribution(ids_BKM, probs_BKM), rows, base_B)
    for b in range(B):
        k, one = int(counts_B[b]), slice(b, b + 1)
        q = SparseDistribution(ids_BKM[one, :k], probs_BKM[one, :k])
        alone = verify(
            p_BTV[one, : k + 1], draft_BK[one, :k], counts_B[one], q, rows.select(torch.tensor([b])), base_B[one]
        )
        assert int(together.accepted_B[b]) == int(alone.accepted_B[0]) <= k
        length = int(alone.accepted_B[0]) + 1
        assert together.tokens_BT[b, :length].tolist() == alone.tokens_BT[0, :length].tolist()
        assert together.tokens_BT[b, length:].count_nonzero() == 0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_greedy_accepts_the_argmax_prefix_and_adds_the_argmax(data: st.DataObject) -> None:
    B, K, V = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4)), 6
    best_BT = torch.tensor(data.draw(_matrix(B, K + 1, V)))
    draft_BK = torch.tensor(data.draw(_matrix(B, K, V)), dtype=torch.int64).view(B, K)
    counts_B = torch.tensor(data.draw(st.lists(st.integers(0, K), min_size=B, max_size=B)))
    p_BTV = torch.nn.functional.one_hot(best_BT, V).float()
    verdict = verify(p_BTV, draft_BK, counts_B, None, sampled_rows(B, temperature=0.0), torch.zeros(B).long())
    for b in range(B):
        accepted = 0
        while accepted < counts_B[b] and draft_BK[b, accepted] == best_BT[b, accepted]:
            accepted += 1
        assert int(verdict.accepted_B[b]) == accepted
        assert verdict.tokens_BT[b, : accepted + 1].tolist() == best_BT[b, : accepted + 1].tolist()


def _matrix(rows: int, columns: int, below: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, below - 1), min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


def test_greedy_rows_ignore_a_q_that_others_bring() -> None:
    p_BTV = torch.nn.functional.one_hot(torch.tensor([[3, 4]]), 6).float()
    misleading = SparseDistribution(torch.tensor([[[3, 5]]]), torch.tensor([[[0.1, 0.9]]]))
    verdict = verify(
        p_BTV, torch.tensor([[3]]), torch.tensor([1]), misleading, sampled_rows(1, temperature=0.0), torch.tensor([0])
    )
    assert verdict.tokens_BT.tolist() == [[3, 4]]


def test_an_empty_residual_falls_back_to_p() -> None:
    """p equal to q up to rounding, and yet rejected: the token still comes from p."""
    p_V = torch.tensor([0.0, 0.5, 0.5])
    n = 1000
    q = SparseDistribution(torch.tensor([1, 2, 0]).expand(n, 1, 3), torch.tensor([0.5, 0.5, 0.0]).expand(n, 1, 3))
    impossible_BK = torch.zeros(n, 1, dtype=torch.int64)
    verdict = verify(
        p_V.expand(n, 2, 3), impossible_BK, torch.ones(n).long(), q, sampled_rows(n), torch.zeros(n).long()
    )
    assert verdict.accepted_B.count_nonzero() == 0
    assert p_value(verdict.tokens_BT[:, 0][verdict.tokens_BT[:, 0] > 0] - 1, p_V[1:]) > ALPHA
    assert verdict.tokens_BT[:, 0].min() > 0


def sound_q() -> tuple[SparseDistribution, Tensor, Tensor, Tensor]:
    """Three rows of K = 2, M = 3, vocabulary 10: full, one token deep, two candidates wide; padding is rubbish."""
    ids = torch.tensor([[[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [99, 99, -7]], [[1, 2, 99], [4, 5, 4]]])
    probs = torch.tensor([[[0.5, 0.25, 0.25]] * 2, [[0.5, 0.25, 0.25], [9, -9, float("nan")]], [[0.5, 0.5, 7.0]] * 2])
    draft = torch.tensor([[1, 5], [2, 77], [1, 5]])
    return SparseDistribution(ids, probs), draft, torch.tensor([2, 1, 2]), torch.tensor([3, 3, 2])


def test_a_sound_q_passes_whatever_its_padding_holds() -> None:
    assert check_q(*sound_q(), vocab_size=10).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("ids_BKM", 10, "outside the vocabulary"),
        ("ids_BKM", -1, "outside the vocabulary"),
        ("ids_BKM", 4, "twice"),
        ("probs_BKM", float("nan"), "not finite"),
        ("probs_BKM", float("inf"), "not finite"),
        ("probs_BKM", -0.25, "negative"),
        ("probs_BKM", 0.255, "does not sum to 1"),
        ("probs_BKM", 0.0, "does not sum to 1"),
    ],
)
def test_a_wrong_q_is_found_in_its_row_only(field: str, value: float, problem: str) -> None:
    q, draft_BK, counts_B, widths_B = sound_q()
    getattr(q, field)[0, 1, 2] = value
    found = check_q(q, draft_BK, counts_B, widths_B, vocab_size=10).tolist()
    assert problem in Q_PROBLEMS[found[0]]
    assert found[1:] == [0, 0]


def test_a_token_that_q_excludes_is_found() -> None:
    q, draft_BK, counts_B, widths_B = sound_q()
    draft_BK[2, 1] = 9
    found = check_q(q, draft_BK, counts_B, widths_B, vocab_size=10).tolist()
    assert found[:2] == [0, 0]
    assert "cannot have been drawn" in Q_PROBLEMS[found[2]]


def test_a_q_over_the_whole_vocabulary_needs_no_ids() -> None:
    generator = torch.Generator().manual_seed(5)
    B, K, V = 64, 3, 12
    p_BTV = torch.rand(B, K + 1, V, generator=generator).softmax(dim=-1)
    probs_BKV = (3 * torch.rand(B, K, V, generator=generator)).softmax(dim=-1).bfloat16().float()
    draft_BK = torch.randint(0, V, (B, K), generator=generator)
    counts_B = torch.arange(B) % (K + 1)
    rows = replace(sampled_rows(B), temperature_B=torch.where(torch.arange(B) % 5 == 0, 0.0, 1.0))
    p_BTV = torch.where(rows.greedy_B[:, None, None], torch.eye(V)[p_BTV.argmax(dim=-1)], p_BTV)
    with_ids = SparseDistribution(torch.arange(V).expand(B, K, V), probs_BKV)
    verdicts = [
        verify(p_BTV, draft_BK, counts_B, q, rows, torch.zeros(B, dtype=torch.int64))
        for q in (with_ids, SparseDistribution(None, probs_BKV))
    ]
    assert torch.equal(verdicts[0].tokens_BT, verdicts[1].tokens_BT)
    assert torch.equal(verdicts[0].accepted_B, verdicts[1].accepted_B)
    widths_B = torch.full((B,), V)
    assert not check_q(SparseDistribution(None, probs_BKV), draft_BK, counts_B, widths_B, V).any()
