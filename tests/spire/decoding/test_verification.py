"""Every rule is lossless: what comes out is distributed as the target says, whatever the draft says.

Each test of a distribution has a control: a rule that is not lossless fails it. Thresholds come from chi-square's
distribution at a false alarm rate of one in a million; numbers are fixed, so a test fails always or never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import starmap

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor

from spire.decoding.drafting import RoundInputs, draft_tokens
from spire.decoding.randomness import Purpose
from spire.decoding.sampling import Rule, SamplingRows, draw, pick, top_m
from spire.decoding.verification import Q_PROBLEMS, SparseDistribution, Verdict, check_q, verify
from tests.marks import thoroughly

ALPHA = 1e-6
Verify = Callable[[Tensor, Tensor, Tensor, SparseDistribution | None, SamplingRows, Tensor], Verdict]
# How many draft tokens of each block are verified, from p [B, T, V], the draft tokens and q.
Stop = Callable[[Tensor, Tensor, SparseDistribution | None], Tensor]
every_rule = pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name.lower())


def sampled_rows(count: int, temperature: float = 1.0, rule: Rule = Rule.REJECTION) -> SamplingRows:
    """One sequence per row: its seed is its number."""
    zeros, ones = torch.zeros(count, dtype=torch.int64), torch.ones(count)
    seeds, rules = torch.arange(count), torch.full((count,), int(rule))
    return SamplingRows(ones * temperature, zeros, ones, ones * 0, seeds, zeros, rules)


def accept_everything(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution | None, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    """The lossy rule that must fail."""
    uniforms_BT = rows.uniforms(base_B, p_BTV.shape[1], Purpose.SAMPLE)
    last_B = draw(p_BTV[:, -1], uniforms_BT.gather(1, counts_B[:, None])[:, 0])
    return Verdict(counts_B, torch.cat((draft_BK, last_B[:, None]), dim=1))


def accept_typical(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution | None, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    """Typical acceptance of one token: it stands when p(x) passes a threshold that depends on p's entropy."""
    p_BV = p_BTV[:, 0]
    entropy_B = -(p_BV * p_BV.clamp(min=1e-30).log()).sum(-1)
    threshold_B = torch.minimum(torch.tensor(0.09), 0.3 * (-entropy_B).exp())
    accepted_B = (p_BV.gather(1, draft_BK[:, :1]).squeeze(1) > threshold_B).long()
    drawn_B = draw(p_BV, rows.uniforms(base_B, 1, Purpose.SAMPLE)[:, 0])
    first_B = torch.where(accepted_B == 1, draft_BK[:, 0], drawn_B)
    return Verdict(accepted_B, torch.stack((first_B, drawn_B), dim=1))


def generate(
    p_VV: Tensor,
    q_VV: Tensor,
    n: int,
    length: int,
    k: int,
    rule: Rule = Rule.REJECTION,
    m: int | None = None,
    check: Verify = verify,
    stop: Stop | None = None,
) -> Tensor:
    """n sequences [n, length] of a chain, in which the next token depends on the last one alone, in rounds of k.

    Each starts after token 0 at position 5; the draft draws from the m most probable tokens of its own chain.
    """
    rows = sampled_rows(n, rule=rule)
    base_B, newest_B = torch.full((n,), 5), torch.zeros(n, dtype=torch.int64)
    written_BL = torch.zeros(n, length + 5 + k + 2, dtype=torch.int64)
    counts_B = torch.full((n,), k)
    while int(base_B.min()) < 5 + length:
        draft_BK, q = drafted(q_VV, newest_B, base_B, k, rows, m)
        fed_BT = torch.cat((newest_B[:, None], draft_BK), dim=1)
        if stop:
            counts_B = stop(p_VV[fed_BT], draft_BK, q)
        verdict = check(p_VV[fed_BT], draft_BK, counts_B, q, rows, base_B)
        for offset, token_B in enumerate(verdict.tokens_BT.unbind(1)):
            going = (verdict.accepted_B >= offset) & (base_B + offset < 5 + length)
            written_BL[going, (base_B + offset)[going]] = token_B[going]
        newest_B = verdict.tokens_BT.gather(1, verdict.accepted_B[:, None])[:, 0]
        base_B = torch.where(base_B < 5 + length, base_B + verdict.accepted_B + 1, base_B)
    return written_BL[:, 5 : 5 + length]


class Given:
    """A round of a draft whose next token depends on the newest alone."""

    def __init__(self, q_VV: Tensor):
        self.q_VV = self.hidden_BD = q_VV

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        return self.q_VV[tokens_B].log()


def drafted(
    q_VV: Tensor, newest_B: Tensor, base_B: Tensor, k: int, rows: SamplingRows, m: int | None
) -> tuple[Tensor, SparseDistribution | None]:
    """As the draft service draws, and as it sends q."""
    if k == 0:
        return newest_B.new_zeros(len(newest_B), 0), None
    answer = draft_tokens(Given(q_VV), RoundInputs(newest_B, base_B, k, rows, m))
    q = None if answer.probs_BKM is None else SparseDistribution(answer.ids_BKM, answer.probs_BKM.float())
    return answer.tokens_BK, q


def p_value(tokens_N: Tensor, p_V: Tensor) -> float:
    expected = p_V.double() / p_V.double().sum() * len(tokens_N)
    return float(stats.chisquare(tokens_N.bincount(minlength=len(p_V)).numpy(), expected.numpy()).pvalue)


def first_token_p_value(check: Verify, p_VV: Tensor, q_VV: Tensor, n: int, rule: Rule = Rule.REJECTION) -> float:
    return p_value(generate(p_VV, q_VV, n, 1, k=1, rule=rule, check=check)[:, 0], p_VV[0])


def p_values(tokens_BL: Tensor, p_VV: Tensor) -> list[float]:
    """Of each position, of all pairs of neighbours, and of the first three tokens together."""
    V = len(p_VV)
    marginals = [p_VV[0]]
    for _ in range(tokens_BL.shape[1] - 1):
        marginals.append(marginals[-1] @ p_VV)
    values = [p_value(tokens_BL[:, at], marginal) for at, marginal in enumerate(marginals)]
    pairs = [marginal[:, None] * p_VV for marginal in marginals[:-1]]
    values += [p_value(tokens_BL[:, at] * V + tokens_BL[:, at + 1], pair.flatten()) for at, pair in enumerate(pairs)]
    three_BL = tokens_BL[:, :3] * torch.tensor([V * V, V, 1])
    return [*values, p_value(three_BL.sum(dim=1), (pairs[0][:, :, None] * p_VV).flatten())]


def chain(seed: int, V: int = 16) -> Tensor:
    return (torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.2).softmax(-1)


# The anti-correlated case: what the draft finds likely the target does not.
RISING_VV = (torch.arange(1, 17) / 136).expand(16, 16)


@every_rule
@pytest.mark.parametrize(("k", "m"), [(3, 3), *starmap(thoroughly, [(5, None), (1, 6), (1, 2), (3, 6), (5, 2)])])
def test_sequences_follow_the_target_over_many_rounds(rule: Rule, k: int, m: int | None) -> None:
    p_VV, q_VV = chain(1, 6), chain(2, 6)
    assert min(p_values(generate(p_VV, q_VV, 40_000, 6, k, rule, m), p_VV)) > ALPHA


@every_rule
def test_an_anti_correlated_draft_does_not_bend_the_output(rule: Rule) -> None:
    assert first_token_p_value(verify, RISING_VV, RISING_VV.flip(1), 200_000, rule) > ALPHA


@every_rule
def test_a_draft_of_one_token_does_not_bend_the_output(rule: Rule) -> None:
    p_VV, q_VV = chain(3, 6), chain(4, 6)
    assert min(p_values(generate(p_VV, q_VV, 40_000, 4, 3, rule, m=1), p_VV)) > ALPHA


@pytest.mark.parametrize("lossy", [accept_everything, accept_typical])
def test_lossy_rules_fail_the_same_tests(lossy: Verify) -> None:
    assert first_token_p_value(lossy, RISING_VV, RISING_VV.flip(1), 200_000) < ALPHA
    assert first_token_p_value(lossy, chain(0), chain(100), 50_000) < ALPHA
    assert min(p_values(generate(chain(1, 6), chain(2, 6), 40_000, 6, 1, check=lossy), chain(1, 6))) < ALPHA


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_sharing_randomness_between_draft_and_verifier_fails_the_same_test(
    monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    plain = SamplingRows.uniforms
    monkeypatch.setattr(SamplingRows, "uniforms", lambda rows, base, count, _: plain(rows, base, count, Purpose.DRAFT))
    assert first_token_p_value(verify, RISING_VV, RISING_VV.flip(1), 200_000, rule) < ALPHA


def test_block_verification_needs_new_numbers_for_inspected_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = (0.3, 0.7), q = (0.6, 0.4), k = 3: numbers of discarded positions, used again, bend the third token."""
    p_VV, q_VV = torch.tensor([0.3, 0.7]).expand(2, 2), torch.tensor([0.6, 0.4]).expand(2, 2)
    assert min(p_values(generate(p_VV, q_VV, 100_000, 4, 3, Rule.BLOCK), p_VV)) > ALPHA
    monkeypatch.setattr(SamplingRows, "by_blocks_B", property(lambda rows: torch.zeros_like(rows.rule_B)))
    third_B = generate(p_VV, q_VV, 100_000, 4, 3, Rule.BLOCK)[:, 2]
    assert p_value(third_B, p_VV[0]) < ALPHA


def accepted_share(rule: Rule, k: int, p_VV: Tensor, q_VV: Tensor, n: int = 50_000) -> float:
    """Mean number of draft tokens accepted in a first round, over k."""
    rows, base_B, newest_B = sampled_rows(n, rule=rule), torch.full((n,), 5), torch.zeros(n, dtype=torch.int64)
    draft_BK, q = drafted(q_VV, newest_B, base_B, k, rows, None)
    fed_BT = torch.cat((newest_B[:, None], draft_BK), dim=1)
    verdict = verify(p_VV[fed_BT], draft_BK, torch.full((n,), k), q, rows, base_B)
    return float(verdict.accepted_B.double().mean()) / k


def test_rejection_accepts_the_overlap_of_p_and_q_invariant_little_less() -> None:
    """Means of n indicators, within 5.5 standard deviations: the overlap is 1 - TV, and the invariant rule accepts at
    least (1 - TV) / (1 + TV)."""
    p_VV, q_VV = chain(1), chain(2)
    overlap = float(torch.minimum(p_VV[0], q_VV[0]).sum())
    deviation = 5.5 * (overlap * (1 - overlap) / 50_000) ** 0.5
    for rule in (Rule.REJECTION, Rule.BLOCK):
        assert abs(accepted_share(rule, 1, p_VV, q_VV) - overlap) < deviation + 2.0**-9  # q travels in bfloat16
    assert accepted_share(Rule.INVARIANT, 1, p_VV, q_VV) > overlap / (2 - overlap) - deviation


@pytest.mark.thorough
def test_the_invariant_rule_agrees_on_individually_unlikely_tokens() -> None:
    """2,000 tokens, nearly as probable: still at least (1 - TV) / (1 + TV) of them."""
    n, generator = 5_000, torch.Generator().manual_seed(0)
    logits_V = torch.randn(2000, generator=generator) * 0.3
    p_V, q_V = logits_V.softmax(-1), (logits_V + 0.1 * torch.randn(2000, generator=generator)).softmax(-1)
    rows, position_B = sampled_rows(n, rule=Rule.INVARIANT), torch.full((n,), 6)
    agree = (pick(p_V.expand(n, -1), rows, position_B) == pick(q_V.expand(n, -1), rows, position_B)).double().mean()
    overlap = float(torch.minimum(p_V, q_V).sum())
    assert agree > overlap / (2 - overlap) - 5.5 * (0.25 / n) ** 0.5


def test_block_verification_accepts_more_than_rejection() -> None:
    """Two independent means of numbers in 0..1: their difference has a standard deviation below sqrt(1/2n)."""
    for seed in range(3):
        p_VV, q_VV = chain(seed), chain(seed + 100)
        gain = accepted_share(Rule.BLOCK, 4, p_VV, q_VV) - accepted_share(Rule.REJECTION, 4, p_VV, q_VV)
        assert gain > 5.5 * (1 / 100_000) ** 0.5


def test_under_the_invariant_rule_the_text_depends_on_the_seed_alone() -> None:
    p_VV = chain(1, 40)
    texts = [generate(p_VV, chain(k, 40), 200, 20, k, Rule.INVARIANT) for k in range(9)]
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert len(texts[0].unique(dim=0)) == 200
    others = [generate(p_VV, chain(2, 40), 200, 20, k, Rule.REJECTION) for k in (1, 2)]
    assert not torch.equal(*others)


def test_rows_of_different_rules_do_not_touch_each_other() -> None:
    n, p_VV, q_VV = 60, chain(1), chain(2)
    mixed = sampled_rows(n)
    mixed = replace(mixed, rule_B=torch.arange(n) % 3 + 1)
    newest_B, base_B, counts_B = torch.zeros(n, dtype=torch.int64), torch.full((n,), 5), torch.full((n,), 3)
    draft_BK, q = drafted(q_VV, newest_B, base_B, 3, mixed, 8)
    assert q is not None
    fed_BT = torch.cat((newest_B[:, None], draft_BK), dim=1)
    together = verify(p_VV[fed_BT], draft_BK, counts_B, q, mixed, base_B)
    for rule in Rule:
        of_rule = (mixed.rule_B == rule).nonzero().squeeze(1)
        one = (p_VV[fed_BT][of_rule], draft_BK[of_rule], counts_B[of_rule], q.select(of_rule))
        alone = verify(*one, mixed.select(of_rule), base_B[of_rule])
        assert torch.equal(together.tokens_BT[of_rule], alone.tokens_BT)


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
