"""The sampling pipeline: logits to probabilities to tokens.

The verifier first adjusts the logits (bias, penalties, masks); then temperature, top_k, top_p and min_p apply. The rule
of a sequence decides how tokens are drawn: by inverse CDF or, under the invariant rule, by Gumbel noise, which depends
on position and token but not on the token's probability.

Shapes: B sequences, T positions, N = rows of any kind, V vocabulary, M candidates kept of a draft's distribution.
Does not know: histories, logprobs, which draft tokens are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spire.decoding.randomness import Purpose, gumbel, random_bits, uniforms_behind

# Less probable tokens are rare: they have no Gumbel noise of their own, and are first ignored in finding top_p's
# cutoff. With a higher threshold, draft and target agree on fewer tokens.
_NOT_RARE = 2.0**-14
# The number of ids in a block: a rare token is drawn by drawing its block first.
_BLOCK = 64


class Rule(IntEnum):
    """A sequence's verification rule, which also decides how its tokens are drawn. Numbered as in the protocol."""

    REJECTION = 1
    BLOCK = 2
    INVARIANT = 3


class Share(Enum):
    """How many of a batch's sequences have a property: none, some or all."""

    NONE = 0
    SOME = 1
    ALL = 2

    @classmethod
    def of(cls, true_B: Tensor) -> Share:
        true, of_all = int(true_B.sum()), len(true_B)
        return cls.ALL if true == of_all else cls.SOME if true else cls.NONE


class Mix(NamedTuple):
    """The kinds of sequences in a batch. Code for a GPU branches on them without reading a tensor from the GPU."""

    greedy: Share
    truncated: Share
    invariant: Share
    # Sequences whose rule needs q.
    judged_by_q: Share
    rules: tuple[Rule, ...]
    # True if a temperature is neither 0 nor 1; True if one is so low that divided logits might be infinite.
    tempered: bool
    nearly_greedy: bool

    @classmethod
    def of(cls, rows: SamplingRows) -> Mix:
        temperature_B = rows.temperature_B
        return cls(
            greedy=Share.of(rows.greedy_B),
            truncated=Share.of(rows.truncated_B),
            invariant=Share.of(rows.invariant_B),
            judged_by_q=Share.of(rows.judged_by_q_B),
            rules=tuple(Rule(number) for number in rows.rule_B.unique().tolist()),
            tempered=not bool((rows.greedy_B | (temperature_B == 1)).all()),
            nearly_greedy=bool(((temperature_B > 0) & (temperature_B < 1e-4)).any()),
        )


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of B sequences, one tensor per parameter. `seed_B` has uint64 bit patterns in int64."""

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
    def truncated_B(self) -> Tensor:
        """True for sequences whose top_k, top_p or min_p may exclude tokens; never for greedy sequences."""
        return ((self.top_k_B > 0) | (self.top_p_B < 1) | (self.min_p_B > 0)) & ~self.greedy_B

    @cached_property
    def invariant_B(self) -> Tensor:
        """True for sequences whose tokens the invariant rule picks; never for greedy ones, equal by any rule."""
        return (self.rule_B == Rule.INVARIANT) & ~self.greedy_B

    @cached_property
    def judged_by_q_B(self) -> Tensor:
        """True for sequences whose rule needs q (rejection, block): all but greedy and invariant ones."""
        return ~(self.greedy_B | self.invariant_B)

    @cached_property
    def mix(self) -> Mix:
        return Mix.of(self)

    @cached_property
    def by_blocks_B(self) -> Tensor:
        """1 for sequences under block verification, 0 for others (int64)."""
        return (self.rule_B == Rule.BLOCK).long()

    @property
    def divisor_B11(self) -> Tensor:
        """The divisor of the logits: the temperature, or 1 for greedy sequences."""
        return torch.where(self.greedy_B, 1.0, self.temperature_B)[:, None, None]

    def to(self, device: torch.device) -> SamplingRows:
        """Return these sampling parameters on another device, and the mix as it is known here."""
        if device == self.seed_B.device:
            return self
        moved = SamplingRows(*(getattr(self, field.name).to(device) for field in fields(self)))
        return moved.with_mix(self.mix)

    def with_mix(self, mix: Mix) -> SamplingRows:
        """Set the mix, which would otherwise be read from the tensors, and return the rows."""
        self.__dict__["mix"] = mix
        return self

    def select(self, index: Tensor) -> SamplingRows:
        """Return the sampling parameters of the sequences at `index`."""
        return SamplingRows(*(getattr(self, field.name)[index] for field in fields(self)))

    def uniforms(self, base_B: Tensor, count: int, purpose: Purpose) -> Tensor:
        """Return uniform random numbers [B, count] for the positions after `base_B`, the base positions of the round.

        Block verification uses the numbers of positions that it then discards, and using them again would bias the
        output. Under block verification, the numbers therefore also depend on the base.
        """
        return uniforms_behind(base_B, count, purpose, self.seed_B, self.choice_B, self.by_blocks_B)


def probabilities(logits_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Return the distributions that tokens are drawn from, after temperature, then top_k, top_p and min_p.

    top_p is relative to the total probability after top_k, min_p to the most probable token. Greedy rows are one-hot at
    the argmax, so that greedy sequences need no verification rule of their own.
    """
    mix = rows.mix
    if mix.greedy is Share.ALL:
        return _one_hot(logits_BTV)
    if mix.nearly_greedy:
        # With the maximum at zero, a tiny temperature gives -inf and never inf - inf.
        logits_BTV = logits_BTV - logits_BTV.amax(dim=-1, keepdim=True)
    if mix.tempered:
        logits_BTV = logits_BTV / rows.divisor_B11
    probs_BTV = logits_BTV.softmax(dim=-1)
    if mix.truncated is Share.ALL:
        return _truncate(probs_BTV, rows)
    if mix.truncated is Share.SOME and may_wait(probs_BTV):
        index = rows.truncated_B.nonzero().squeeze(1)
        probs_BTV[index] = _truncate(probs_BTV[index], rows.select(index))
    elif mix.truncated is Share.SOME:
        probs_BTV = torch.where(rows.truncated_B[:, None, None], _truncate(probs_BTV, rows), probs_BTV)
    if mix.greedy is Share.SOME:
        return torch.where(rows.greedy_B[:, None, None], _one_hot(probs_BTV), probs_BTV)
    return probs_BTV


def may_wait(numbers: Tensor) -> bool:
    """True if the shape of a result may depend on these numbers: on a CPU. A GPU would have to be waited for."""
    return numbers.device.type == "cpu"


def _one_hot(scores_BTV: Tensor) -> Tensor:
    return torch.zeros_like(scores_BTV).scatter_(-1, scores_BTV.argmax(dim=-1, keepdim=True), 1.0)


def _truncate(probs_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply top_k, then top_p, then min_p to each distribution, and renormalise.

    At least one token is kept. Equally probable tokens are ranked by id, lower ids first.
    """
    T, V = probs_BTV.shape[1:]
    probs_NV = probs_BTV.reshape(-1, V)
    top_k_N, top_p_N, min_p_N = (p.repeat_interleave(T) for p in (rows.top_k_B, rows.top_p_B, rows.min_p_B))
    floor_N = min_p_N * probs_NV.amax(dim=-1)
    top_k_N = torch.where((top_k_N > 0) & (top_k_N < V), top_k_N, V)
    if not may_wait(probs_NV):
        probs_NV = _keep_ranked_of_all(probs_NV, top_k_N, top_p_N)
    elif bool(((top_k_N < V) | (top_p_N < 1)).any()):
        probs_NV = _keep_ranked(probs_NV, top_k_N, top_p_N)
    kept_NV = probs_NV.where(probs_NV >= floor_N[:, None], 0.0)
    return (kept_NV / kept_NV.sum(dim=-1, keepdim=True)).view_as(probs_BTV)


def _keep_ranked(probs_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Apply top_k, then top_p: zero the probabilities of the tokens they exclude, without renormalising.

    A row's cutoff is found by sorting its top_k tokens or, without top_k, its tokens of probability >= 2^-14 if they
    sum to top_p, else all. The cutoff depends neither on other rows nor on how many tokens are sorted.
    """
    V = probs_NV.shape[1]
    keep_N = torch.full_like(top_k_N, V)
    least_N = torch.zeros_like(top_p_N)

    def cut(index: Tensor, sorted_NC: Tensor) -> None:
        keep = _ranks_kept(sorted_NC, top_k_N[index], top_p_N[index], V)
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


def _keep_ranked_of_all(probs_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Compute `_keep_ranked` by sorting all probabilities, so that no shape depends on them."""
    sorted_NV = probs_NV.sort(dim=-1, descending=True).values
    keep_N = _ranks_kept(sorted_NV, top_k_N, top_p_N, probs_NV.shape[1])
    least_N1 = sorted_NV.gather(1, keep_N[:, None] - 1)
    above_NV, tied_NV = probs_NV > least_N1, probs_NV == least_N1
    room_N1 = keep_N[:, None] - above_NV.sum(dim=-1, keepdim=True)
    return probs_NV.where(above_NV | tied_NV & (tied_NV.cumsum(dim=-1) <= room_N1), 0.0)


def _sorted_down(probs_NV: Tensor) -> Tensor:
    return -torch.from_numpy(np.sort(-probs_NV.numpy(), axis=-1))  # far faster than torch's sort


def _ranks_kept(sorted_NC: Tensor, top_k_N: Tensor, top_p_N: Tensor, vocabulary: int) -> Tensor:
    """Return the number of most probable tokens that top_k and top_p keep in each row, at least one."""
    rank_C = torch.arange(sorted_NC.shape[-1], device=sorted_NC.device)
    upto_NC = sorted_NC.cumsum(dim=-1)
    # top_p is relative to the total probability after top_k, or to 1 without top_k.
    last_N = (top_k_N - 1).clamp(max=len(rank_C) - 1)
    whole_N = torch.where(top_k_N < vocabulary, upto_NC.gather(1, last_N[:, None])[:, 0], 1.0)
    gathered_NC = (upto_NC - sorted_NC >= (top_p_N * whole_N)[:, None]) & (top_p_N < 1)[:, None]
    return (~gathered_NC & (rank_C < top_k_N[:, None]) | (rank_C == 0)).sum(dim=-1)


def _without_surplus(kept_NV: Tensor, least_N: Tensor, keep_N: Tensor) -> Tensor:
    """Set ties at the lowest kept probability to 0, highest ids first, until each row keeps `keep_N` tokens."""
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
    """A selection of tokens in N rows, as flat lists [C] ordered by row and id."""

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
        """The index of each selected token among the selected tokens of its row."""
        starts_N = self.counts_N.cumsum(0) - self.counts_N
        return torch.arange(len(self.row_C), device=self.row_C.device) - starts_N[self.row_C]

    def padded(self) -> Tensor:
        """Return the selected tokens' probabilities as [N, C], each row padded with zeros at its end."""
        padded_NC = self.prob_C.new_zeros(len(self.counts_N), max(1, int(self.counts_N.max())))
        return padded_NC.index_put_((self.row_C, self.column_C), self.prob_C)


def sample(probs_BV: Tensor, rows: SamplingRows, base_B: Tensor) -> Tensor:
    """Draw the target's token at position base + 1 of each sequence, as the sequence's rule requires, int64 [B]."""
    ids_B = draw(probs_BV, rows.uniforms(base_B, 1, Purpose.SAMPLE)[:, 0])
    return with_invariant(ids_B, probs_BV, rows, base_B + 1)


def with_invariant(ids_B: Tensor, probs_BV: Tensor, rows: SamplingRows, position_B: Tensor) -> Tensor:
    """Return the tokens `ids_B`, except for sequences under the invariant rule, whose tokens `pick` draws."""
    if rows.mix.invariant is Share.NONE:
        return ids_B
    if not may_wait(probs_BV):
        return torch.where(rows.invariant_B, pick(probs_BV, rows, position_B), ids_B)
    index = rows.invariant_B.nonzero().squeeze(1)
    return ids_B.index_put((index,), pick(probs_BV[index], rows.select(index), position_B[index]))


def pick(probs_NV: Tensor, rows: SamplingRows, position_N: Tensor) -> Tensor:
    """Draw tokens [N] from distributions p [N, V]: argmax over x of log p(x) + Gumbel noise of position and x.

    With the same noise, similar distributions mostly yield the same token. Tokens of probability < 2^-14 have no noise
    of their own but compete as one token of their total probability; if it wins, `_pick_rare` draws one of them.
    Grouping is exact, because the maximum of Gumbel variables is a Gumbel variable and is independent of the argmax.
    """
    if not may_wait(probs_NV):
        return _pick_of_all(probs_NV, rows, position_N)
    common = _Chosen.of(probs_NV >= _NOT_RARE, probs_NV)
    bits_N = random_bits(rows.seed_B, rows.choice_B, position_N, Purpose.NOISE)
    score_C = common.prob_C.double().log() + gumbel(bits_N[common.row_C], common.id_C)
    rest_NV = probs_NV.where(probs_NV < _NOT_RARE, 0.0)
    # The rare tokens' common key follows the key of the last token.
    rest_N = rest_NV.sum(dim=-1).double().log() + gumbel(bits_N, torch.tensor(probs_NV.shape[-1]))
    best_N = rest_N.scatter_reduce(0, common.row_C, score_C, "amax")
    wins_C = score_C == best_N[common.row_C]
    ids_N = common.id_C.new_zeros(len(probs_NV)).index_put_((common.row_C[wins_C],), common.id_C[wins_C])
    of_rest = (rest_N == best_N).nonzero().squeeze(1)
    if len(of_rest):
        bits_N = random_bits(rows.seed_B[of_rest], rows.choice_B[of_rest], position_N[of_rest], Purpose.TAIL)
        ids_N[of_rest] = _pick_rare(rest_NV[of_rest], bits_N)
    return ids_N


def _pick_of_all(probs_NV: Tensor, rows: SamplingRows, position_N: Tensor) -> Tensor:
    """Compute `pick` with noise for all tokens, so that no shape depends on the probabilities."""
    V, common_NV = probs_NV.shape[-1], probs_NV >= _NOT_RARE
    bits_N = random_bits(rows.seed_B, rows.choice_B, position_N, Purpose.NOISE)
    keys = torch.arange(V + 1, device=probs_NV.device)
    score_NV = probs_NV.double().log() + gumbel(bits_N[:, None], keys[:V])
    best_N, ids_N = score_NV.masked_fill_(~common_NV, -torch.inf).max(dim=-1)
    rest_NV = probs_NV.masked_fill(common_NV, 0.0)
    rest_N = rest_NV.sum(dim=-1).double().log() + gumbel(bits_N, keys[V])
    rare_N = _pick_rare(rest_NV, random_bits(rows.seed_B, rows.choice_B, position_N, Purpose.TAIL))
    return torch.where(rest_N >= best_N, rare_N, ids_N)


def _pick_rare(probs_NV: Tensor, bits_N: Tensor) -> Tensor:
    """Draw a rare token by Gumbel noise: first a block of ids by its total probability, then an id of this block.

    Inverse CDF would be less stable: its thousands of thresholds all move with the last bit of one probability.
    """
    V = probs_NV.shape[-1]
    blocks_NGT = pad(probs_NV, (0, -V % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    # The blocks' keys follow the keys of the ids.
    keys_G = V + torch.arange(blocks_NGT.shape[1], device=probs_NV.device)
    block_N = _winner(blocks_NGT.sum(dim=-1), bits_N, keys_G)
    first_N = block_N * _BLOCK
    tokens_NT = blocks_NGT[torch.arange(len(block_N), device=probs_NV.device), block_N]
    ids_NT = first_N[:, None] + torch.arange(_BLOCK, device=probs_NV.device)
    return first_N + _winner(tokens_NT, bits_N, ids_NT)


def _winner(weights: Tensor, bits_N: Tensor, keys: Tensor) -> Tensor:
    """Return the argmax [N] over the last dimension of log weight + the key's Gumbel noise. Weight 0 never wins."""
    return (weights.double().log() + gumbel(bits_N[:, None], keys)).argmax(dim=-1)


def draw(probs_V: Tensor, uniforms: Tensor) -> Tensor:
    """Draw int64 token ids [...] from distributions [..., V] by inverse CDF of uniform numbers [...].

    The uniform numbers are scaled by the row's sum, so rows need not sum to 1. Tokens of probability 0 are never drawn.
    """
    cumulative_V = probs_V.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative_V[..., -1:]
    # Rounding must not lift a threshold to the total: no cumulative sum is above it.
    threshold = torch.minimum(uniforms[..., None] * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative_V, threshold, right=True).clamp_(max=probs_V.shape[-1] - 1)
    if may_wait(probs_V):
        return ids.squeeze(-1)  # a CPU summed in order: the first sum above the threshold has a positive probability
    likeliest = probs_V.argmax(dim=-1, keepdim=True)
    return torch.where(probs_V.gather(-1, ids) > 0, ids, likeliest).squeeze(-1)


def top_m(probs_BV: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the m most probable tokens' ids and renormalised probabilities, [B, m]. A draft draws its tokens from this
    distribution, which it also sends as q."""
    probs_BM, ids_BM = probs_BV.topk(min(m, probs_BV.shape[-1]), dim=-1)
    return ids_BM, probs_BM / probs_BM.sum(dim=-1, keepdim=True)
