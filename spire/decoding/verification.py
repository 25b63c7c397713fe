"""Verification rules: which draft tokens are accepted, and which token follows. All keep the target's distribution.

Rejection: draft token x is accepted with probability min(1, p(x)/q(x)). At the first rejection the final token is drawn
from norm(max(0, p - q)), after k acceptances from p.
Block (Sun et al., "Block verification accelerates speculative decoding"): a random number for each prefix decides if it
is accepted. The longest accepted prefix, of weight P, is kept; the final token is drawn from norm(max(0, P p - q)).
Invariant: the target draws every token with its position's noise, and a draft token is accepted if it is the same.
Greedy is each of these rules with p one-hot at the argmax and q one-hot at the draft token. p and q are the
distributions that tokens are actually drawn from, after the sampling pipeline.

Shapes: B sequences, K draft tokens at most (`counts_B` of them real, 0..K), T = K + 1 positions with a p, V vocabulary,
M candidates of q. Draft token i (1-based) is at absolute position base + i; p_BTV[:, i - 1] is its distribution.
Does not know: where p and q came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spire.decoding.randomness import Purpose
from spire.decoding.sampling import Rule, SamplingRows, Share, draw, may_wait, pick, sample
from spire.kernels import collect, collects

# The largest deviation of a row's sum from one: the worst case of rounding each term to bfloat16.
Q_SUM_TOLERANCE = 4e-3
# The least divisor of a row: padding sums to zero.
_LEAST_SUM = 1e-30


@dataclass(frozen=True)
class SparseDistribution:
    """A draft's q as sent: M candidates per draft token or, without `ids_BKM`, the tokens `vocabulary_M`, which ascend,
    or without these the whole vocabulary in order of ids.

    Rows need not sum to one, because the draft draws in proportion to the numbers that it sends, which may be rounded
    to bfloat16. Rows are normalised only when they are used, because for most rows only the sum is needed. Padding has
    probability zero and any id in the vocabulary.
    """

    ids_BKM: Tensor | None
    probs_BKM: Tensor
    # The sum and the minimum of each row, if known.
    sums_BK: Tensor | None = None
    leasts_BK: Tensor | None = None
    vocabulary_M: Tensor | None = None

    @classmethod
    def whole(
        cls,
        probs_KM: Sequence[Tensor | None],
        K: int,
        width: int,
        device: torch.device,
        vocabulary_M: Tensor | None = None,
    ) -> SparseDistribution:
        """Build q over all `width` tokens of a vocabulary from B tensors of up to K rows. Missing rows are padding."""
        if device.type == "cpu" and all(rows is None or collects(rows) for rows in probs_KM):
            return cls(None, *collect(probs_KM, K, width), vocabulary_M)
        there = next((rows.device for rows in probs_KM if rows is not None), device)
        probs_BKM = torch.zeros(len(probs_KM), K, width, device=there)
        for row, rows_KM in enumerate(probs_KM):
            if rows_KM is not None:
                probs_BKM[row, : len(rows_KM)] = rows_KM
        return cls(None, probs_BKM.to(device), vocabulary_M=vocabulary_M)

    @classmethod
    def of_rows(
        cls,
        ids_XKM: Tensor | None,
        probs_XKM: Tensor,
        rows: Sequence[int | None],
        device: torch.device,
        vocabulary_M: Tensor | None = None,
    ) -> SparseDistribution:
        """Build q for B sequences by selecting `rows` from tensors with X rows. None becomes padding."""
        if ids_XKM is None and device.type == "cpu" and collects(probs_XKM[0]):
            of_rows = [None if row is None else probs_XKM[row] for row in rows]
            return cls(None, *collect(of_rows, *probs_XKM.shape[1:]), vocabulary_M)
        chosen_B = torch.tensor([row or 0 for row in rows], device=probs_XKM.device)
        padding_B11 = torch.tensor([row is None for row in rows], device=device)[:, None, None]
        # Move before converting: bfloat16 has half of the bytes.
        probs_BKM = probs_XKM[chosen_B].to(device).float().masked_fill_(padding_B11, 0)
        ids_BKM = None if ids_XKM is None else ids_XKM[chosen_B].to(device).long()
        return cls(ids_BKM, probs_BKM, vocabulary_M=vocabulary_M)

    def spread(self, vocab_size: int) -> SparseDistribution:
        """Return q over the whole vocabulary if it is over `vocabulary_M`, otherwise itself."""
        if self.vocabulary_M is None:
            return self
        probs_BKV = self.probs_BKM.new_zeros(*self.probs_BKM.shape[:2], vocab_size)
        return SparseDistribution(None, probs_BKV.index_copy_(-1, self.vocabulary_M, self.probs_BKM), self.sums_BK)

    @property
    def collected(self) -> bool:
        """True if q covers a whole vocabulary, in bfloat16 as sent, and the sums of its rows are known."""
        return self.ids_BKM is None and self.sums_BK is not None and self.probs_BKM.dtype == torch.bfloat16

    @cached_property
    def sum_BK(self) -> Tensor:
        """The sum of each row of q, float32."""
        return self.probs_BKM.sum(dim=-1, dtype=torch.float32) if self.sums_BK is None else self.sums_BK

    @property
    def least_BK(self) -> Tensor:
        """The minimum of each row of q."""
        return self.probs_BKM.amin(dim=-1) if self.leasts_BK is None else self.leasts_BK

    @cached_property
    def normal_BKM(self) -> Tensor:
        """q with every row normalised to sum to one."""
        return self.probs_BKM / self.sum_BK.clamp(min=_LEAST_SUM)[..., None]

    def of(self, tokens_BK: Tensor) -> Tensor:
        """Return the normalised probabilities [B, K] of tokens under q, zero for tokens that are not candidates."""
        if self.vocabulary_M is not None:
            last = len(self.vocabulary_M) - 1
            place_BK = torch.searchsorted(self.vocabulary_M, tokens_BK.contiguous()).clamp(max=last)
            among_BK = self.vocabulary_M[place_BK] == tokens_BK
            of_tokens_BK = self.probs_BKM.gather(-1, place_BK[..., None]).squeeze(-1) * among_BK
        elif self.ids_BKM is None:
            of_tokens_BK = self.probs_BKM.gather(-1, tokens_BK[..., None]).squeeze(-1)
        else:
            of_tokens_BK = (self.probs_BKM * (self.ids_BKM == tokens_BK[..., None])).sum(dim=-1)
        return of_tokens_BK / self.sum_BK.clamp(min=_LEAST_SUM)

    def taken_from(self, p_BV: Tensor, at_B: Tensor) -> Tensor:
        """Return the residual max(0, p - q), [B, V], with q of the draft token at index `at_B`, after `spread`. p need
        not sum to 1."""
        row_B = torch.arange(len(p_BV), device=p_BV.device)
        probs_BM = self.probs_BKM[row_B, at_B] / self.sum_BK[row_B, at_B].clamp(min=_LEAST_SUM)[:, None]
        if self.ids_BKM is None:
            return (p_BV - probs_BM).clamp_(min=0)
        return p_BV.scatter_add(1, self.ids_BKM[row_B, at_B], -probs_BM).clamp_(min=0)

    def select(self, index: Tensor) -> SparseDistribution:
        """Return q of the sequences at `index`, after `spread`."""
        return SparseDistribution(None if self.ids_BKM is None else self.ids_BKM[index], self.probs_BKM[index])


@dataclass(frozen=True)
class Verdict:
    """The result of verification. A row of `tokens_BT` is its accepted draft tokens, a final token, then zeros."""

    accepted_B: Tensor
    tokens_BT: Tensor

    @classmethod
    def of(cls, draft_BK: Tensor, accepted_B: Tensor, final_B: Tensor) -> Verdict:
        """Build the verdict that accepts the first `accepted_B` draft tokens of each row and appends `final_B`."""
        tokens_BT = torch.cat((draft_BK, draft_BK.new_zeros(len(draft_BK), 1)), dim=1)
        position_T = torch.arange(tokens_BT.shape[1], device=draft_BK.device)
        tokens_BT = torch.where(position_T < accepted_B[:, None], tokens_BT, 0)
        return cls(accepted_B, tokens_BT.scatter_(1, accepted_B[:, None], final_B[:, None]))

    def replaced(self, rows_B: Tensor, other: Verdict) -> Verdict:
        """Return this verdict with the rows of another one where `rows_B` is true."""
        tokens_BT = torch.where(rows_B[:, None], other.tokens_BT, self.tokens_BT)
        return Verdict(torch.where(rows_B, other.accepted_B, self.accepted_B), tokens_BT)


# A rule for a batch: p, draft tokens and their numbers, q, sampling parameters and bases to the verdict, like `verify`.
Verify = Callable[[Tensor, Tensor, Tensor, SparseDistribution | None, SamplingRows, Tensor], Verdict]


def verify(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution | None, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    """Verify each row's draft tokens by its rule. If None, and for greedy rows, q is one-hot at the draft tokens."""
    if draft_BK.shape[1] == 0:
        return Verdict.of(draft_BK, torch.zeros_like(counts_B), sample(p_BTV[:, 0], rows, base_B))
    if q is None:
        q = SparseDistribution(draft_BK[..., None], torch.ones_like(draft_BK[..., None], dtype=torch.float32))
    q = q.spread(p_BTV.shape[-1])
    if rows.mix.greedy is not Share.NONE:
        q = _one_hot_where_greedy(q, draft_BK, rows.greedy_B)
    present = rows.mix.rules
    if len(present) == 1:
        return _RULES[present[0]](p_BTV, draft_BK, counts_B, q, rows, base_B)
    verdict = Verdict(torch.zeros_like(counts_B), draft_BK.new_zeros(p_BTV.shape[:2]))
    for rule in present:
        if not may_wait(p_BTV):
            of_all = _RULES[rule](p_BTV, draft_BK, counts_B, q, rows, base_B)
            verdict = verdict.replaced(rows.rule_B == rule, of_all)
            continue
        index = (rows.rule_B == rule).nonzero().squeeze(1)
        arguments = (p_BTV[index], draft_BK[index], counts_B[index], q.select(index), rows.select(index), base_B[index])
        part = _RULES[rule](*arguments)
        verdict.accepted_B[index], verdict.tokens_BT[index] = part.accepted_B, part.tokens_BT
    return verdict


def _reject(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    offset_K = torch.arange(1, draft_BK.shape[1] + 1, device=draft_BK.device)
    u_BK = rows.uniforms(base_B, len(offset_K), Purpose.ACCEPT)
    # u < p/q without division: a token with p = 0 is always rejected, a token with only q = 0 always accepted.
    stands_BK = (u_BK * q.of(draft_BK) < _of_draft(p_BTV, draft_BK)) & (offset_K <= counts_B[:, None])
    accepted_B = stands_BK.cumprod(dim=1).sum(dim=1)
    final_BV = _final_distribution(p_BTV, q, accepted_B, counts_B, torch.ones_like(p_BTV[:, 0, 0]))
    return _concluded(draft_BK, accepted_B, final_BV, rows, base_B)


def _reject_blocks(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    """Verify by the block rule. P_i = min(1, P_(i-1) p/q), with P_0 = 1, is the weight of the first i draft tokens. The
    prefix of all k tokens is accepted with probability P_k, a shorter prefix with R_i / (R_i + 1 - P_i), where R_i is
    the sum of max(0, P_i p - q) over the vocabulary at the next position."""
    offset_K = torch.arange(1, draft_BK.shape[1] + 1, device=draft_BK.device)
    ratio_BK = _of_draft(p_BTV, draft_BK) / q.of(draft_BK)
    ratio_BK = ratio_BK.nan_to_num(nan=1.0)  # 0/0: p and q both exclude the token
    weights = [torch.ones_like(p_BTV[:, 0, 0])]
    for ratio_B in ratio_BK.unbind(1):
        weights.append((weights[-1] * ratio_B).clamp(max=1))
    weight_BT = torch.stack(weights, dim=1)
    left_BK = _sum_left(p_BTV, q, weight_BT)
    stays_BK = left_BK / (left_BK + 1 - weight_BT[:, :-1])
    # 0/0: the prefix has weight 1, and p equals q at the next position.
    stays_BK = torch.cat((stays_BK.nan_to_num(nan=1.0)[:, 1:], weight_BT[:, -1:]), dim=1)[:, : len(offset_K)]
    stays_BK = torch.where(offset_K == counts_B[:, None], weight_BT[:, 1:], stays_BK)
    u_BK = rows.uniforms(base_B, len(offset_K), Purpose.ACCEPT)
    stands_BK = (u_BK < stays_BK) & (offset_K <= counts_B[:, None])
    accepted_B = (stands_BK * offset_K).amax(dim=1)
    weight_B = weight_BT.gather(1, accepted_B[:, None])[:, 0]
    final_BV = _final_distribution(p_BTV, q, accepted_B, counts_B, weight_B)
    return _concluded(draft_BK, accepted_B, final_BV, rows, base_B)


def _concluded(draft_BK: Tensor, accepted_B: Tensor, final_BV: Tensor, rows: SamplingRows, base_B: Tensor) -> Verdict:
    """Draw the final token of each row from `final_BV` and return the verdict."""
    uniform_BT = rows.uniforms(base_B, draft_BK.shape[1] + 1, Purpose.SAMPLE)
    return Verdict.of(draft_BK, accepted_B, draw(final_BV, uniform_BT.gather(1, accepted_B[:, None])[:, 0]))


def _match(
    p_BTV: Tensor, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution, rows: SamplingRows, base_B: Tensor
) -> Verdict:
    """Verify by the invariant rule: accept draft tokens while they equal the target's own picks."""
    (B, T), K = p_BTV.shape[:2], draft_BK.shape[1]
    row_N = torch.arange(B, device=draft_BK.device).repeat_interleave(T)
    position_BT = base_B[:, None] + torch.arange(1, T + 1, device=draft_BK.device)
    own_BT = pick(p_BTV.flatten(0, 1), rows.select(row_N), position_BT.flatten()).view(B, T)
    offset_K = torch.arange(1, K + 1, device=draft_BK.device)
    stands_BK = (own_BT[:, :K] == draft_BK) & (offset_K <= counts_B[:, None])
    accepted_B = stands_BK.long().cumprod(dim=1).sum(dim=1)
    return Verdict.of(draft_BK, accepted_B, own_BT.gather(1, accepted_B[:, None])[:, 0])


_RULES = {Rule.REJECTION: _reject, Rule.BLOCK: _reject_blocks, Rule.INVARIANT: _match}


def _of_draft(p_BTV: Tensor, draft_BK: Tensor) -> Tensor:
    """Return the draft tokens' probabilities under p, [B, K]."""
    return p_BTV[:, : draft_BK.shape[1]].gather(-1, draft_BK[..., None]).squeeze(-1)


def _sum_left(p_BTV: Tensor, q: SparseDistribution, weight_BT: Tensor) -> Tensor:
    """Return the sum of max(0, P_(i-1) p - q) over the vocabulary for each draft token i, [B, K], P = `weight_BT`.

    Only candidates of q need the difference: every other token contributes P_(i-1) p.
    """
    K = q.probs_BKM.shape[1]
    p_BKV, weight_BK1 = p_BTV[:, :K], weight_BT[:, :K, None]
    if q.ids_BKM is None:
        return (weight_BK1 * p_BKV - q.normal_BKM).clamp(min=0).sum(dim=-1)
    p_BKM = p_BKV.gather(-1, q.ids_BKM) * (q.probs_BKM > 0)
    of_others_BK = weight_BK1[..., 0] * (p_BKV.sum(dim=-1) - p_BKM.sum(dim=-1)).clamp(min=0)
    return of_others_BK + (weight_BK1 * p_BKM - q.normal_BKM).clamp(min=0).sum(dim=-1)


def _one_hot_where_greedy(q: SparseDistribution, draft_BK: Tensor, greedy_B: Tensor) -> SparseDistribution:
    greedy_B11 = greedy_B[:, None, None]
    if q.ids_BKM is None:
        one_hot_BKM = torch.zeros_like(q.probs_BKM).scatter_(-1, draft_BK[..., None], 1.0)
        return SparseDistribution(None, torch.where(greedy_B11, one_hot_BKM, q.probs_BKM))
    first_M = torch.arange(q.ids_BKM.shape[-1], device=draft_BK.device) == 0
    ids_BKM = torch.where(greedy_B11, draft_BK[..., None], q.ids_BKM)
    return SparseDistribution(ids_BKM, torch.where(greedy_B11, first_M.to(q.probs_BKM.dtype), q.probs_BKM))


def _final_distribution(
    p_BTV: Tensor, q: SparseDistribution, accepted_B: Tensor, counts_B: Tensor, weight_B: Tensor
) -> Tensor:
    """Return the residual max(0, P p - q), P = `weight_B`, or p if all tokens are accepted or the residual is zero."""
    K = q.probs_BKM.shape[1]
    p_BV = p_BTV[torch.arange(len(p_BTV), device=p_BTV.device), accepted_B]
    rejected_B1 = (accepted_B < counts_B)[:, None]
    residual_BV = q.taken_from(weight_B[:, None] * p_BV, accepted_B.clamp(max=K - 1))
    return torch.where(rejected_B1 & (residual_BV.sum(dim=1, keepdim=True) > 0), residual_BV, p_BV)


# Possible problems of a row of q, indexed by the result of `check_q`.
Q_PROBLEMS = (
    "",
    "q has an id outside the vocabulary",
    "q names an id twice",
    "q is negative or not finite",
    f"q does not sum to 1 within {Q_SUM_TOLERANCE}",
    "a draft token has no probability under q: it cannot have been drawn from it",
)


def check_q(q: SparseDistribution, draft_BK: Tensor, counts_B: Tensor, widths_B: Tensor, vocab_size: int) -> Tensor:
    """Return the first problem of each row's q as an index into Q_PROBLEMS, 0 if there is none.

    Row b has counts_B[b] draft tokens and widths_B[b] candidates; padding is not checked. Draft tokens are only checked
    to be possible under q: the verifier has to trust the draft that it drew the tokens from q.
    """
    K = q.probs_BKM.shape[1]
    real_BK = torch.arange(K, device=draft_BK.device) < counts_B[:, None]
    ids_fit_B, ids_differ_B, real = _check_ids(q, real_BK, widths_B, vocab_size)
    # A sum is finite only if every term is, and no term is negative if the least term is not.
    positive_BK, sum_BK, possible_BK = real.least_BK >= 0, real.sum_BK, real.of(draft_BK) > 0
    normalised_BK = (sum_BK - 1).abs() <= Q_SUM_TOLERANCE
    sound_B = (positive_BK & normalised_BK & possible_BK | ~real_BK).all(dim=1) & ids_fit_B & ids_differ_B
    if sound_B.all():
        return torch.zeros_like(counts_B)
    wrong_BK = torch.stack((positive_BK & sum_BK.isfinite(), normalised_BK, possible_BK)).logical_not_() & real_BK
    problems = torch.stack((~ids_fit_B, ~ids_differ_B, *wrong_BK.any(dim=-1)), dim=1)
    return torch.where(sound_B, 0, problems.int().argmax(dim=1) + 1)


def _check_ids(
    q: SparseDistribution, real_BK: Tensor, widths_B: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, SparseDistribution]:
    """Return whether each row's ids are in the vocabulary, whether they are distinct, and q with padding set to 0."""
    if q.ids_BKM is None:
        sound_B = torch.ones(len(real_BK), dtype=torch.bool, device=real_BK.device)
        return sound_B, sound_B, q
    column_M = torch.arange(q.ids_BKM.shape[-1], device=real_BK.device)
    real_BKM = real_BK[..., None] & (column_M < widths_B[:, None, None])
    ids_BKM = torch.where(real_BKM, q.ids_BKM, vocab_size + column_M)
    ids_fit_B = ((ids_BKM >= 0) & (ids_BKM < vocab_size) | ~real_BKM).flatten(1).all(dim=1)
    sorted_BKM = ids_BKM.sort(dim=-1).values
    ids_differ_B = (sorted_BKM[..., 1:] != sorted_BKM[..., :-1]).flatten(1).all(dim=1)
    return ids_fit_B, ids_differ_B, SparseDistribution(ids_BKM, torch.where(real_BKM, q.probs_BKM, 0.0))
