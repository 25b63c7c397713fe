"""The sampling pipeline: logits to probabilities to tokens.

Logits are first adjusted (bias, penalties, masks: `verifier_service.pipeline`), then temperature, top_k, top_p, min_p.
How a token is drawn depends on the sequence's rule: by inverse CDF, or, for the invariant rule, as the winner of noise
that every token has at every position whatever its probability.

Shapes: B sequences, T positions, N = rows of any kind, V vocabulary, M candidates kept of a draft's distribution.
What it does not know: histories, logprobs, which draft tokens stand.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spire.randomness import Purpose, gumbel, random_bits, uniforms_behind

# Tokens with noise of their own, and those among which top_p is looked for before all are sorted: mostly some hundreds.
# With 2^-10 draft and target agreed on a third fewer tokens.
_NOT_RARE = 2.0**-14
# Ids to a block, of which the rare ones are picked block first.
_BLOCK = 64


class Rule(IntEnum):
    """Which draft tokens stand (`spire.verification`), and so what randomness depends on. Numbered as on the wire."""

    REJECTION = 1
    BLOCK = 2
    INVARIANT = 3


class Share(Enum):
    """How many of a batch's sequences something is true of."""

    NONE = 0
    SOME = 1
    ALL = 2

    @classmethod
    def of(cls, true_B: Tensor) -> Share:
        true, of_all = int(true_B.sum()), len(true_B)
        return cls.ALL if true == of_all else cls.SOME if true else cls.NONE


@dataclass(frozen=True)
class SamplingRows:
    """How each of B sequences is sampled: one tensor per parameter. `seed_B` holds uint64 bit patterns in int64."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    choice_B: Tensor
    rule_B: Tensor

    @cached_property
    def greedy_B(self) -> Tensor:
        return self.temperature_B == 0

    @cached_property
    def greedy(self) -> Share:
        return Share.of(self.greedy_B)

    @cached_property
    def truncated_B(self) -> Tensor:
        """Where top_k, top_p or min_p may exclude tokens."""
        return ((self.top_k_B > 0) | (self.top_p_B < 1) | (self.min_p_B > 0)) & ~self.greedy_B

    @cached_property
    def truncated(self) -> Share:
        return Share.of(self.truncated_B)

    @cached_property
    def invariant_B(self) -> Tensor:
        return self.rule_B == Rule.INVARIANT

    @cached_property
    def invariant(self) -> Share:
        return Share.of(self.invariant_B)

    @cached_property
    def judged_by_q_B(self) -> Tensor:
        """Whose draft tokens stand or fall by what they were drawn from."""
        return ~(self.greedy_B | self.invariant_B)

    @cached_property
    def judged_by_q(self) -> Share:
        return Share.of(self.judged_by_q_B)

    @cached_property
    def by_blocks_B(self) -> Tensor:
        """1 where blocks are verified whole, int64."""
        return (self.rule_B == Rule.BLOCK).long()

    @cached_property
    def divisor_B11(self) -> Tensor | None:
        """What logits are divided by, None where that is 1 for all."""
        divisor_B = torch.where(self.greedy_B, 1.0, self.temperature_B)
        return None if bool((divisor_B == 1).all()) else divisor_B[:, None, None]

    @cached_property
    def nearly_greedy(self) -> bool:
        """Whether some temperature is so low that logits divided by it might be infinite."""
        return bool(((self.temperature_B > 0) & (self.temperature_B < 1e-4)).any())

    @cached_property
    def of_softmax_alone(self) -> bool:
        """Whether all rows draw from the whole softmax of their logits, or are greedy."""
        return self.truncated is Share.NONE and self.invariant is Share.NONE and not self.nearly_greedy

    def select(self, index: Tensor) -> SamplingRows:
        """The rows at `index`."""
        return SamplingRows(*(getattr(self, field.name)[index] for field in fields(self)))

    def uniforms(self, base_B: Tensor, count: int, purpose: Purpose) -> Tensor:
        """Uniform numbers [B, count] for the positions behind `base_B`, in a round that began there.

        Block verification looks ahead, so what a discarded position has seen is used up: its numbers depend on the
        round's base too.
        """
        return uniforms_behind(base_B, count, purpose, self.seed_B, self.choice_B, self.by_blocks_B)


def probabilities(logits_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution each token is really drawn from: temperature, then top_k, top_p and min_p.

    top_p counts what top_k left, min_p is relative to the most probable token. Greedy rows are one-hot at the argmax,
    so that one rule serves every temperature.
    """
    if rows.greedy is Share.ALL:
        return _one_hot(logits_BTV)
    probs_BTV = _softmax(logits_BTV, rows)
    if rows.truncated is Share.ALL:
        return _truncate(probs_BTV, rows)
    if rows.truncated is Share.SOME:
        index = rows.truncated_B.nonzero().squeeze(1)
        probs_BTV[index] = _truncate(probs_BTV[index], rows.select(index))
    if rows.greedy is Share.SOME:
        index = rows.greedy_B.nonzero().squeeze(1)
        probs_BTV[index] = _one_hot(probs_BTV[index])
    return probs_BTV


def _softmax(logits_BTV: Tensor, rows: SamplingRows) -> Tensor:
    if rows.nearly_greedy:
        # With the maximum at zero a tiny temperature gives -inf and never inf - inf.
        logits_BTV = logits_BTV - logits_BTV.amax(dim=-1, keepdim=True)
    if rows.divisor_B11 is not None:
        logits_BTV = logits_BTV / rows.divisor_B11
    return logits_BTV.softmax(dim=-1)


def _one_hot(scores_BTV: Tensor) -> Tensor:
    return torch.zeros_like(scores_BTV).scatter_(-1, scores_BTV.argmax(dim=-1, keepdim=True), 1.0)


# -- truncation ------------------------------------------------------------------------------------------------------


def _truncate(probs_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Keep the top_k most probable tokens; of those the fewest whose sum reaches top_p; of those what min_p keeps.

    At least one stays. Of equally probable tokens the lower ids come first.
    """
    T, V = probs_BTV.shape[1:]
    probs_NV = probs_BTV.reshape(-1, V)
    top_k_N, top_p_N, min_p_N = (p.repeat_interleave(T) for p in (rows.top_k_B, rows.top_p_B, rows.min_p_B))
    floor_N = min_p_N * probs_NV.amax(dim=-1)
    top_k_N = torch.where((top_k_N > 0) & (top_k_N < V), top_k_N, V)
    if bool(((top_k_N < V) | (top_p_N < 1)).any()):
        probs_NV = _keep_ranked(probs_NV, top_k_N, top_p_N)
    kept_NV = probs_NV.where(probs_NV >= floor_N[:, None], 0.0)
    return (kept_NV / kept_NV.sum(dim=-1, keepdim=True)).view_as(probs_BTV)


def _keep_ranked(probs_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Zero but for the tokens whose rank is below top_k and before whose rank less than top_p was gathered.

    Where to cut is seen in the most probable tokens of a row, sorted: as many as top_k asks for, or those that are
    not rare where they gather top_p, or else all. It depends on the row alone, not on its neighbours or on how many
    were sorted.
    """
    V = probs_NV.shape[1]
    keep_N = torch.full_like(top_k_N, V)
    least_N = torch.zeros_like(top_p_N)

    def cut(index: Tensor, sorted_NC: Tensor) -> None:
        keep = _ranks_kept(sorted_NC, top_k_N[index], top_p_N[index])
        keep_N[index], least_N[index] = keep, sorted_NC.gather(1, keep[:, None] - 1)[:, 0]

    by_k = (top_k_N < V).nonzero().squeeze(1)
    if len(by_k):
        cut(by_k, probs_NV[by_k].topk(int(top_k_N[by_k].max())).values)
    by_p = ((top_k_N == V) & (top_p_N < 1)).nonzero().squeeze(1)
    if len(by_p):
        common = _Chosen.of(probs_NV[by_p] >= _NOT_RARE, probs_NV[by_p])
        sorted_NC = common.padded().sort(dim=-1, descending=True).values
        enough = sorted_NC.cumsum(dim=-1)[:, -1] >= top_p_N[by_p]
        cut(by_p[enough], sorted_NC[enough])
        by_sorting = by_p[~enough]
        cut(by_sorting, _sorted_down(probs_NV[by_sorting]))
    kept_NV = probs_NV.where(probs_NV >= least_N[:, None], 0.0)
    return _without_surplus(kept_NV, least_N, keep_N)


def _sorted_down(probs_NV: Tensor) -> Tensor:
    if probs_NV.device.type == "cpu":
        return -torch.from_numpy(np.sort(-probs_NV.numpy(), axis=-1))  # 25 times as fast as torch's
    return probs_NV.sort(dim=-1, descending=True).values


def _ranks_kept(sorted_NC: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """How many of the most probable tokens stay, at least one."""
    rank_C = torch.arange(sorted_NC.shape[-1], device=sorted_NC.device)
    upto_NC = sorted_NC.cumsum(dim=-1)
    # What top_p is a share of: what top_k left, or everything.
    last_N = (top_k_N - 1).clamp(max=len(rank_C) - 1)
    whole_N = torch.where(top_k_N <= len(rank_C), upto_NC.gather(1, last_N[:, None])[:, 0], 1.0)
    gathered_NC = (upto_NC - sorted_NC >= (top_p_N * whole_N)[:, None]) & (top_p_N < 1)[:, None]
    return (~gathered_NC & (rank_C < top_k_N[:, None]) | (rank_C == 0)).sum(dim=-1)


def _without_surplus(kept_NV: Tensor, least_N: Tensor, keep_N: Tensor) -> Tensor:
    """Drop of the tokens that are as probable as the last one kept those with the highest ids, until `keep_N` stay."""
    surplus_N = kept_NV.count_nonzero(dim=-1) - keep_N
    over = (surplus_N > 0).nonzero().squeeze(1)
    if len(over):
        tied = _Chosen.of(kept_NV[over] == least_N[over, None], kept_NV[over])
        room_N = tied.counts_N - surplus_N[over]
        gone_C = tied.column_C >= room_N[tied.row_C]
        kept_NV[over[tied.row_C[gone_C]], tied.id_C[gone_C]] = 0
    return kept_NV


@dataclass(frozen=True)
class _Chosen:
    """Some tokens of N rows, row by row and by id: flat [C] lists."""

    row_C: Tensor
    id_C: Tensor
    prob_C: Tensor
    counts_N: Tensor

    @classmethod
    def of(cls, which_NV: Tensor, probs_NV: Tensor) -> _Chosen:
        row_C, id_C = which_NV.nonzero(as_tuple=True)
        return cls(row_C, id_C, probs_NV[row_C, id_C], torch.bincount(row_C, minlength=len(probs_NV)))

    @property
    def column_C(self) -> Tensor:
        """How many of its row come before each."""
        starts_N = self.counts_N.cumsum(0) - self.counts_N
        return torch.arange(len(self.row_C), device=self.row_C.device) - starts_N[self.row_C]

    def padded(self) -> Tensor:
        """Their probabilities, [N, C], zeros behind."""
        padded_NC = self.prob_C.new_zeros(len(self.counts_N), max(1, int(self.counts_N.max())))
        return padded_NC.index_put_((self.row_C, self.column_C), self.prob_C)


# -- draws -----------------------------------------------------------------------------------------------------------


def sample(probs_BV: Tensor, rows: SamplingRows, base_B: Tensor) -> Tensor:
    """The target's own token right behind each sequence's `base_B`, int64, as its rule draws it."""
    ids_B = draw(probs_BV, rows.uniforms(base_B, 1, Purpose.SAMPLE)[:, 0])
    return with_invariant(ids_B, probs_BV, rows, base_B + 1)


def with_invariant(ids_B: Tensor, probs_BV: Tensor, rows: SamplingRows, position_B: Tensor) -> Tensor:
    """`ids_B`, but for sequences under the invariant rule what their noise picks."""
    if rows.invariant is Share.NONE:
        return ids_B
    index = rows.invariant_B.nonzero().squeeze(1)
    return ids_B.index_put((index,), pick(probs_BV[index], rows.select(index), position_B[index]))


def pick(probs_NV: Tensor, rows: SamplingRows, position_N: Tensor) -> Tensor:
    """argmax over x of log p(x) + g(seed, choice, position, x): a draw from p that every similar p comes to as well.

    Only tokens that are not rare have noise of their own. The others compete as one, with their summed probability, and
    where they win, one of them is picked: the largest of Gumbels is a Gumbel, and whose it is does not depend on it.
    """
    common = _Chosen.of(probs_NV >= _NOT_RARE, probs_NV)
    bits_N = random_bits(rows.seed_B, rows.choice_B, position_N, Purpose.NOISE)
    score_C = common.prob_C.double().log() + gumbel(bits_N[common.row_C], common.id_C)
    rest_NV = probs_NV.where(probs_NV < _NOT_RARE, 0.0)
    # Behind the last token's key.
    rest_N = rest_NV.sum(dim=-1).double().log() + gumbel(bits_N, torch.tensor(probs_NV.shape[-1]))
    best_N = rest_N.scatter_reduce(0, common.row_C, score_C, "amax")
    wins_C = score_C == best_N[common.row_C]
    ids_N = common.id_C.new_zeros(len(probs_NV)).index_put_((common.row_C[wins_C],), common.id_C[wins_C])
    of_rest = (rest_N == best_N).nonzero().squeeze(1)
    if len(of_rest):
        bits_N = random_bits(rows.seed_B[of_rest], rows.choice_B[of_rest], position_N[of_rest], Purpose.TAIL)
        ids_N[of_rest] = _pick_rare(rest_NV[of_rest], bits_N)
    return ids_N


def _pick_rare(probs_NV: Tensor, bits_N: Tensor) -> Tensor:
    """One of many tokens, again as who wins with noise: a block of ids by its sum, then an id of that block.

    An inverse CDF would be no cheaper to trust: its thousands of borders all move with the last bit of a probability.
    """
    V = probs_NV.shape[-1]
    blocks_NGT = pad(probs_NV, (0, -V % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    # Behind the ids' keys.
    keys_G = V + torch.arange(blocks_NGT.shape[1], device=probs_NV.device)
    block_N = _winner(blocks_NGT.sum(dim=-1), bits_N, keys_G)
    first_N = block_N * _BLOCK
    tokens_NT = blocks_NGT[torch.arange(len(block_N), device=probs_NV.device), block_N]
    ids_NT = first_N[:, None] + torch.arange(_BLOCK, device=probs_NV.device)
    return first_N + _winner(tokens_NT, bits_N, ids_NT)


def _winner(weights: Tensor, bits_N: Tensor, keys: Tensor) -> Tensor:
    """argmax of log weight + noise of its key along the last of [N, C]. What weighs nothing never wins."""
    return (weights.double().log() + gumbel(bits_N[:, None], keys)).argmax(dim=-1)


def draw(probs_V: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids from distributions [..., V] and uniform numbers [...]: inverse CDF, int64.

    The numbers scale with the row's sum, so rows need not be normalised. A token of probability zero never comes out.
    """
    cumulative_V = probs_V.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative_V[..., -1:]
    # Rounding must not lift a threshold to the very end, behind which there is no token.
    threshold = torch.minimum(uniforms[..., None] * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative_V, threshold, right=True).clamp_(max=probs_V.shape[-1] - 1)
    if probs_V.device.type == "cpu":
        return ids.squeeze(-1)  # one sum after the other: the first one above the threshold is of a token that adds
    likeliest = probs_V.argmax(dim=-1, keepdim=True)
    return torch.where(probs_V.gather(-1, ids) > 0, ids, likeliest).squeeze(-1)


def top_m(probs_BV: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m most probable tokens and their renormalised probabilities: what a draft samples from and sends as q."""
    probs_BM, ids_BM = probs_BV.topk(min(m, probs_BV.shape[-1]), dim=-1)
    return ids_BM, probs_BM / probs_BM.sum(dim=-1, keepdim=True)
