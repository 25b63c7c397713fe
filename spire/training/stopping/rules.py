"""Compare rules of stopping a draft: discarded draft tokens against rounds (SpecDec++, section 4).

The target's own text is drafted after every position, as deep as any rule drafts, and every draft token is judged by
the target. So all rules are compared on the same blocks. A walk over the text tells how probable it is that a round
begins at each position: after a round of n accepted tokens the next one begins n + 1 positions later.

Shapes: N texts, T positions at which a round can begin, J draft tokens of a block, R rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spire.decoding.stopping import standing_for
from spire.model.draft import RolloutBlocks
from spire.training.branches import judged_blocks
from spire.training.draft import load_pair
from spire.training.stopping.figures import HeadFigures, Predicted, figures_of, interval95

# Blocks of one text that are drafted and judged at once.
_BLOCKS = 128
# Resamples of the texts for a 95 % interval, and their seed.
_RESAMPLES, _RESAMPLING_SEED = 2000, 5
# Thresholds of a front: probabilities that a block stands below which drafting stops. The least ones draft as deep as
# the deepest fixed k, so that no part of a front is interpolated over many depths.
THRESHOLDS = (1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.02, *(n / 20 for n in range(1, 19)))
# The bounds of the cost rule's threshold, as the gateway's.
_LEAST, _MOST = 0.02, 0.9
# Rounds of the search for the threshold of the cost rule, which depends on the rate that it brings.
_SETTLING = 20
# Draft tokens behind the first, in the mean of a round, that tell what one more costs.
_TELLING = 0.05


class JudgedTexts(NamedTuple):
    """Judged draft tokens [N, T, J]. `ratio_NTJ`: p/q. `predicted_NTJ`: the probability, by the draft's head, that a
    token is accepted if those before it in its block are; None without a head. `q_NTJ`: at temperature 1.
    `entropy_NTJ`: of q, in nats."""

    ratio_NTJ: Tensor
    predicted_NTJ: Tensor | None
    q_NTJ: Tensor
    entropy_NTJ: Tensor

    @property
    def accepted_NTJ(self) -> Tensor:
        """The probability, min(1, p/q), that the target accepts each token if it accepts those before it."""
        return self.ratio_NTJ.clamp(max=1.0)

    def stands_NTJ(self, by_block: bool) -> Tensor:
        """Return the probability that the target accepts each token and all before it, whatever is drafted after it: by
        the rejection rule, or by the block rule (the weight P of its prefix), where p/q above 1 makes up for others."""
        if not by_block:
            return self.accepted_NTJ.double().cumprod(dim=-1)
        stands = [self.accepted_NTJ[..., 0].double()]
        for ratio_NT in self.ratio_NTJ[..., 1:].unbind(dim=-1):
            stands.append((stands[-1] * ratio_NT).clamp(max=1.0))
        return torch.stack(stands, dim=-1)

    def of_head(self) -> HeadFigures | None:
        """Return how well the head tells accepted from rejected tokens; None without a head."""
        if self.predicted_NTJ is None:
            return None
        stands_NTJ = self.accepted_NTJ.cumprod(dim=-1)
        reached_NTJ = torch.cat((torch.ones_like(stands_NTJ[..., :1]), stands_NTJ[..., :-1]), dim=-1)
        text_NTJ = torch.arange(len(stands_NTJ))[:, None, None].expand_as(stands_NTJ)
        parts = (self.predicted_NTJ, self.q_NTJ.log(), self.entropy_NTJ, self.accepted_NTJ, reached_NTJ, text_NTJ)
        return figures_of(Predicted(*(part.reshape(-1) for part in parts)))


class Judge:
    """A target that judges what its draft guesses. Raises the errors of `load_pair`."""

    def __init__(self, target_directory: Path, draft_directory: Path, device: str = "cpu"):
        self.target, self.draft = load_pair(target_directory, draft_directory, device)
        self._device = device

    @torch.inference_mode()
    def judge(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        k: int,
        temperature: float,
        advance: Callable[[], None] = lambda: None,
        seed: int = 0,
    ) -> JudgedTexts:
        """Draft k tokens after every token of every answer and judge them. All answers must be equally long."""
        random, parts = torch.Generator(self._device).manual_seed(seed), list[JudgedTexts]()
        with torch.autocast(self._device, dtype=torch.bfloat16):
            for prompt, answer in zip(prompts, answers, strict=True):
                tokens_BL = torch.tensor([prompt + answer], device=self._device)
                starts_T = torch.arange(len(prompt), tokens_BL.shape[1], device=self._device)
                blocks = [RolloutBlocks(some_T, k) for some_T in starts_T.split(_BLOCKS)]
                of_text = [self._judge(tokens_BL, some, temperature, random) for some in blocks]
                parts.append(joined(of_text, dim=1))
                advance()
        return joined(parts)

    def _judge(
        self, tokens_BL: Tensor, blocks: RolloutBlocks, temperature: float, random: torch.Generator
    ) -> JudgedTexts:
        temperature_B = torch.tensor([temperature], device=self._device)
        judged, predicted = judged_blocks(self.draft, self.target, tokens_BL, blocks, temperature_B, random), None
        if self.draft.stop_head is not None:
            logit_JBT = self.draft.stop_head(judged.hidden_JBTD, judged.told_JBTF)
            predicted = _by_place(logit_JBT.float().sigmoid())
        log_q_JBT, entropy_JBT = judged.told_JBTF[..., :2].unbind(dim=-1)
        own = _by_place(log_q_JBT.exp()), _by_place(entropy_JBT)
        return JudgedTexts(_by_place(judged.ratio_JBT), predicted, *own)


def _by_place(values_JBT: Tensor) -> Tensor:
    return values_JBT.permute(1, 2, 0).cpu()


def joined(parts: list[JudgedTexts], dim: int = 0) -> JudgedTexts:
    """Return the texts of all parts as one, or with `dim` = 1 the places of all parts of the same texts."""
    ratio, predicted, q, entropy = zip(*parts, strict=True)
    heads = [part for part in predicted if part is not None]
    joined = (torch.cat(ratio, dim), torch.cat(heads, dim) if heads else None)
    return JudgedTexts(*joined, torch.cat(q, dim), torch.cat(entropy, dim))


class Tally(NamedTuple):
    """Expected rounds of each text under each rule, by the draft tokens and by the accepted ones of a round: two of
    [R, N, J + 1]. A round gives its accepted tokens and one of the target's."""

    drafted_RNJ: Tensor
    accepted_RNJ: Tensor

    def sums(self, weight_SN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rounds, the draft tokens and the accepted tokens of weighted texts: three of [S, R]."""
        depth_J = torch.arange(self.drafted_RNJ.shape[-1], dtype=torch.float64)
        drafted_SRJ, accepted_SRJ = (torch.einsum("rnj,sn->srj", part, weight_SN) for part in self)
        return drafted_SRJ.sum(dim=-1), drafted_SRJ @ depth_J, accepted_SRJ @ depth_J

    def rates(self, weight_SN: Tensor) -> tuple[Tensor, Tensor]:
        """Return discarded draft tokens, and rounds, for each generated token of weighted texts: two of [S, R]."""
        rounds_SR, drafted_SR, accepted_SR = self.sums(weight_SN)
        tokens_SR = rounds_SR + accepted_SR
        return (drafted_SR - accepted_SR) / tokens_SR, rounds_SR / tokens_SR

    def seconds(self, round_seconds_J: Tensor, weight_SN: Tensor) -> Tensor:
        """Return the time of a generated token [S, R], where a round of j draft tokens takes `round_seconds_J[j]`."""
        rounds_SR, _, accepted_SR = self.sums(weight_SN)
        spent_RN = self.drafted_RNJ @ round_seconds_J
        return weight_SN @ spent_RN.T / (rounds_SR + accepted_SR)


def counts_at_depth(judged: JudgedTexts, k: int) -> Tensor:
    """Return the draft tokens of every block [N, T] at depth k."""
    return torch.full(judged.accepted_NTJ.shape[:2], k)


def counts_at_threshold(standing_NTJ: Tensor, threshold: float) -> Tensor:
    """Return the draft tokens of every block [N, T] if drafting stops at the first token with which the block stands
    with a probability below `threshold`. That token is drafted: it is the one that was judged."""
    standing_NTJ = standing_NTJ.cumprod(dim=-1)
    return (1 + (standing_NTJ[..., :-1] >= threshold).sum(dim=-1)).long()


def walk(judged: JudgedTexts, counts_RNT: Tensor, by_block: bool = False) -> Tally:
    """Return what rounds that draft `counts_RNT` tokens bring, by the rejection or the block rule."""
    stands_NTJ = judged.stands_NTJ(by_block)
    (R, N, T), J = counts_RNT.shape, stands_NTJ.shape[-1]
    stands_NTJ = torch.cat((torch.ones(N, T, 1).double(), stands_NTJ), dim=-1)
    depth_J = torch.arange(J + 1)
    after_NTJ = torch.cat((stands_NTJ[..., 1:], torch.zeros(N, T, 1).double()), dim=-1)
    # By the block rule a difference may be negative: only the mean over what may be drafted next is a probability.
    in_block_RNTJ = depth_J < counts_RNT[..., None]
    ends_RNTJ = (stands_NTJ - after_NTJ) * in_block_RNTJ + stands_NTJ * (depth_J == counts_RNT[..., None])
    begins_RNT = torch.zeros(R, N, T + J + 1).double()
    begins_RNT[..., 0] = 1
    for at in range(T):
        begins_RNT[..., at + 1 : at + J + 2] += begins_RNT[..., at, None] * ends_RNTJ[:, :, at]
    begins_RNT = begins_RNT[..., :T]
    drafted_RNJ = torch.zeros(R, N, J + 1).double().scatter_add_(-1, counts_RNT, begins_RNT)
    return Tally(drafted_RNJ, torch.einsum("rnt,rntj->rnj", begins_RNT, ends_RNTJ))


@dataclass(frozen=True)
class Costs:
    """Seconds of a round by its number of draft tokens, 0 to J; only ratios matter."""

    name: str
    round_seconds: tuple[float, ...]

    @classmethod
    def linear(cls, name: str, k: int, target: float, draft: float) -> Costs:
        """Return the costs of a target pass that takes `target`, however many tokens it verifies, and `draft` a draft
        token: the paper's section 4."""
        return cls(name, tuple(target + draft * depth for depth in range(k + 1)))


@dataclass(frozen=True)
class Point:
    """A rule on a front. Rates are for each generated token; `gains` are tokens a second over the best fixed k, by the
    name of the costs, with the ends of the 95 % interval over texts."""

    rule: str
    setting: float
    drafted: float
    discard_rate: float
    verification_rate: float
    gains: dict[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Fronts:
    """All rules on the texts of a domain.

    `saved`: by how much a rule's front has fewer rounds than fixed k at the same rate of discarded draft tokens, in the
    mean over fixed k from 2 to the deepest but one, with the ends of the 95 % interval over texts. `best_k` is by the
    name of the costs. `head`: how well the draft's head tells accepted from rejected tokens; None without a head.
    """

    domain: str
    texts: int
    temperature: float
    points: list[Point]
    saved: dict[str, tuple[float, float, float]]
    best_k: dict[str, int]
    head: HeadFigures | None


def fronts(
    domain: str, judged: JudgedTexts, temperature: float, all_costs: Sequence[Costs], by_block: bool = False
) -> Fronts:
    """Compare fixed k, thresholds of the head and of the draft's own confidence, the rule by costs, and the oracle. The
    target judges by the rejection rule or by the block rule."""
    k = judged.accepted_NTJ.shape[-1]
    names: list[tuple[str, float]] = [("fixed", depth) for depth in range(k + 1)]
    counts = [counts_at_depth(judged, depth) for depth in range(k + 1)]
    standing = {"confidence": judged.q_NTJ} | ({} if judged.predicted_NTJ is None else {"head": judged.predicted_NTJ})
    for rule, standing_NTJ in standing.items():
        names += [(rule, threshold) for threshold in THRESHOLDS]
        counts += [counts_at_threshold(standing_NTJ, threshold) for threshold in THRESHOLDS]
    if judged.predicted_NTJ is not None:
        for costs in all_costs:
            threshold = cost_threshold(judged, judged.predicted_NTJ, costs, by_block)
            names.append((f"cost: {costs.name}", threshold))
            counts.append(counts_at_threshold(judged.predicted_NTJ, threshold))
    tally = with_oracle(walk(judged, torch.stack(counts), by_block), k)
    names.append(("oracle", k))
    found = _compared(domain, temperature, names, tally, all_costs, len(judged.accepted_NTJ))
    return replace(found, head=judged.of_head())


def with_oracle(tally: Tally, k: int) -> Tally:
    """Add the oracle, which stops before the first token that would be rejected: it accepts what depth k accepts, which
    is the rule at place k, and discards nothing."""
    oracle_NJ = tally.accepted_RNJ[k][None]
    return Tally(torch.cat((tally.drafted_RNJ, oracle_NJ)), torch.cat((tally.accepted_RNJ, oracle_NJ)))


def cost_threshold(judged: JudgedTexts, predicted_NTJ: Tensor, costs: Costs, by_block: bool = False) -> float:
    """Return the probability with which a block must stand for one more draft token to be worth its time.

    `standing_for` tells what one more token brings. It costs what a round has grown by with each token so far, in which
    the texts grow at the present rate. Both depend on the threshold: the search settles them. The gateway's rule is the
    same, by the times and the acceptance that its rounds show.
    """
    round_seconds_J = torch.tensor(costs.round_seconds).double()
    depth_J = torch.arange(len(round_seconds_J)).double()
    stands_NTJ = judged.stands_NTJ(by_block)
    acceptance = float(stands_NTJ.sum() / (stands_NTJ[..., :-1].sum() + stands_NTJ[..., 0].numel()))
    threshold = 0.5
    for _ in range(_SETTLING):
        tally = walk(judged, counts_at_threshold(predicted_NTJ, threshold)[None], by_block)
        share_J = tally.drafted_RNJ.sum(dim=(0, 1)) / tally.drafted_RNJ.sum()
        seconds, drafted = float(share_J @ round_seconds_J), float(share_J @ depth_J)
        tokens = 1 + float(tally.accepted_RNJ.sum(dim=(0, 1)) @ depth_J) / float(tally.accepted_RNJ.sum())
        if drafted - 1 < _TELLING:
            break
        each = (seconds - costs.round_seconds[1]) / (drafted - 1)
        least = standing_for(each * tokens / seconds, acceptance, by_block)
        threshold = (threshold + min(max(least, _LEAST), _MOST)) / 2
    return threshold


def _compared(
    domain: str,
    temperature: float,
    names: list[tuple[str, float]],
    tally: Tally,
    all_costs: Sequence[Costs],
    texts: int,
) -> Fronts:
    """Return the figures of all rules with intervals, from resamples of the texts that all rules share."""
    random = torch.Generator().manual_seed(_RESAMPLING_SEED)
    chosen = torch.randint(texts, (_RESAMPLES, texts), generator=random)
    samples_SN = torch.zeros(_RESAMPLES, texts).scatter_add_(1, chosen, torch.ones(_RESAMPLES, texts))
    weight_SN = torch.cat((torch.ones(1, texts), samples_SN)).double()
    fixed = [at for at, (rule, _) in enumerate(names) if rule == "fixed"]
    gains, best_k = dict[str, Tensor](), dict[str, int]()
    for costs in all_costs:
        seconds_SR = tally.seconds(torch.tensor(costs.round_seconds).double(), weight_SN)
        best = fixed[int(seconds_SR[0, fixed].argmin())]
        best_k[costs.name] = int(names[best][1])
        gains[costs.name] = seconds_SR[:, best, None] / seconds_SR
    discard_SR, verify_SR = tally.rates(weight_SN)
    rounds_SR, drafted_SR, _ = tally.sums(weight_SN)
    whole = zip(names, drafted_SR[0] / rounds_SR[0], discard_SR[0], verify_SR[0], strict=True)
    points = [
        Point(rule, setting, float(drafted), float(discarded), float(verified), _of_rule(gains, at))
        for at, ((rule, setting), drafted, discarded, verified) in enumerate(whole)
    ]
    saved = {
        rule: interval95(torch.tensor([_saved(names, rule, *one) for one in zip(discard_SR, verify_SR, strict=True)]))
        for rule in ("confidence", "head")
        if any(name == rule for name, _ in names)
    }
    return Fronts(domain, texts, temperature, points, saved, best_k, None)


def _of_rule(gains: dict[str, Tensor], at: int) -> dict[str, tuple[float, float, float]]:
    return {name: interval95(gain_SR[:, at]) for name, gain_SR in gains.items()}


def _saved(names: list[tuple[str, float]], rule: str, discard_R: Tensor, verify_R: Tensor) -> float:
    """Return the mean share of rounds that the front of `rule` saves at the rates of discarded tokens of fixed k."""
    fixed = [at for at, (name, _) in enumerate(names) if name == "fixed"]
    # The ends are common to both: a threshold of 1 is depth 1, and one of 0 the greatest depth.
    own = sorted([at for at, (name, _) in enumerate(names) if name == rule], key=lambda at: float(discard_R[at]))
    ends = [fixed[1], *own, fixed[-1]]
    at_x, at_y = [float(discard_R[at]) for at in ends], [float(verify_R[at]) for at in ends]
    shares = [1 - _between(at_x, at_y, float(discard_R[at])) / float(verify_R[at]) for at in fixed[2:-1]]
    return math.fsum(shares) / len(shares)


def _between(at_x: list[float], at_y: list[float], x: float) -> float:
    """Interpolate linearly; `at_x` rises."""
    right = next((at for at, known in enumerate(at_x) if known >= x), len(at_x) - 1)
    left = max(0, right - 1)
    width = at_x[right] - at_x[left]
    share = min(1.0, max(0.0, (x - at_x[left]) / width)) if width > 0 else 0.0
    return at_y[left] + share * (at_y[right] - at_y[left])
