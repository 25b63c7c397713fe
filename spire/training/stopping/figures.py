"""How well a stop head tells draft tokens that the target accepts from those that it rejects.

Shapes: N drafted tokens, S resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Resamples of the groups for a 95 % interval, and their seed.
_RESAMPLES, _RESAMPLING_SEED = 500, 5
_CALIBRATION_GROUPS = 10


class Predicted(NamedTuple):
    """Drafted tokens: what the head predicts, and what a draft without a head knows, beside what the target said.

    `accepted_N`: the probability that the target accepts the token if it accepts those before it in its block.
    `reached_N`: the probability that it accepts those, by which tokens are weighted. `group_N`: from 0 on, the text of
    each token; texts are resampled whole.
    """

    predicted_N: Tensor
    log_q_N: Tensor
    entropy_N: Tensor
    accepted_N: Tensor
    reached_N: Tensor
    group_N: Tensor


@dataclass(frozen=True)
class HeadFigures:
    """Figures of a head on text that it has not learned.

    `auc`: area under the ROC of the head; `auc_of_entropy`, `auc_of_q`: of the draft's own entropy and of q of the
    token. `over_entropy`: the first less the second, with the ends of the 95 % interval over texts. `log_loss` in nats.
    `calibration`: for ten groups of tokens by the prediction, the mean prediction, the share that is accepted, and the
    share of all tokens.
    """

    auc: float
    auc_of_entropy: float
    auc_of_q: float
    over_entropy: tuple[float, float, float]
    log_loss: float
    calibration: list[tuple[float, float, float]]


@torch.no_grad()
def figures_of(tokens: Predicted) -> HeadFigures:
    """Return the figures of a head; each token counts as often as it is reached."""
    accepted_N, reached_N, groups = tokens.accepted_N, tokens.reached_N, int(tokens.group_N.max()) + 1
    head, entropy, q = (_Ranked.of(it) for it in (tokens.predicted_N, -tokens.entropy_N, tokens.log_q_N))
    random = torch.Generator().manual_seed(_RESAMPLING_SEED)
    gains = [head.area(accepted_N, reached_N) - entropy.area(accepted_N, reached_N)]
    for _ in range(_RESAMPLES):
        times_G = torch.bincount(torch.randint(groups, (groups,), generator=random), minlength=groups)
        weight_N = times_G[tokens.group_N] * reached_N
        gains.append(head.area(accepted_N, weight_N) - entropy.area(accepted_N, weight_N))
    losses_N = F.binary_cross_entropy(tokens.predicted_N, accepted_N, reduction="none")
    return HeadFigures(
        auc=head.area(accepted_N, reached_N),
        auc_of_entropy=entropy.area(accepted_N, reached_N),
        auc_of_q=q.area(accepted_N, reached_N),
        over_entropy=interval95(torch.tensor(gains)),
        log_loss=float((reached_N * losses_N).sum() / reached_N.sum()),
        calibration=_calibration(tokens.predicted_N, accepted_N, reached_N),
    )


def interval95(values_S: Tensor) -> tuple[float, float, float]:
    """Return the first value, which is that of all texts, and the 95 % interval of the others, of resampled texts."""
    low, high = torch.quantile(values_S[1:].double(), torch.tensor((0.025, 0.975)).double()).tolist()
    return float(values_S[0]), low, high


def area_under_roc(score_N: Tensor, accepted_N: Tensor, weight_N: Tensor) -> float:
    """Return the probability that an accepted token scores above a rejected one; ties count half.

    Labels are soft: a token is accepted with weight a and rejected with weight 1 - a.
    """
    return _Ranked.of(score_N).area(accepted_N, weight_N)


class _Ranked(NamedTuple):
    """The place of each token's score among the different scores, from the lowest on."""

    levels: int
    place_N: Tensor

    @classmethod
    def of(cls, score_N: Tensor) -> _Ranked:
        levels, place_N = score_N.double().unique(return_inverse=True)
        return cls(len(levels), place_N)

    def area(self, accepted_N: Tensor, weight_N: Tensor) -> float:
        positive, negative = (
            torch.zeros(self.levels, dtype=torch.float64).index_add_(0, self.place_N, (weight_N * share_N).double())
            for share_N in (accepted_N, 1 - accepted_N)
        )
        below = negative.cumsum(dim=0) - negative / 2
        return float((positive * below).sum() / (positive.sum() * negative.sum()))


def _calibration(predicted_N: Tensor, accepted_N: Tensor, weight_N: Tensor) -> list[tuple[float, float, float]]:
    group_N = (predicted_N * _CALIBRATION_GROUPS).long().clamp(max=_CALIBRATION_GROUPS - 1)
    weighted = (weight_N * predicted_N, weight_N * accepted_N, weight_N)
    sums = [torch.zeros(_CALIBRATION_GROUPS).index_add_(0, group_N, x_N) for x_N in weighted]
    return [(float(p / n), float(a / n), float(n / sums[2].sum())) for p, a, n in zip(*sums, strict=True) if n > 0]
