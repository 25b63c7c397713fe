"""The figures of a stop head: its area under the ROC, with an interval over texts."""

from __future__ import annotations

import math

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from spire.training.stopping.figures import Predicted, area_under_roc, figures_of

TEXTS, TOKENS = 50, 100


def predicted(knowing: float, repeated: int = 1) -> Predicted:
    """Tokens of 50 texts, each `repeated` times; the head knows its share of what makes the target accept a token."""
    random = torch.Generator().manual_seed(4)
    size = (TEXTS, TOKENS // repeated)
    easy, other = torch.rand(size, generator=random), torch.rand(size, generator=random)
    accepted = (torch.rand(size, generator=random) < easy).float()

    def tokens(values: Tensor) -> Tensor:
        return values.repeat(1, repeated).reshape(-1)

    ones, text_N = torch.ones(TEXTS * TOKENS), torch.arange(TEXTS).repeat_interleave(TOKENS)
    head_N = tokens(knowing * easy + (1 - knowing) * other)
    return Predicted(head_N, -tokens(other), tokens(other), tokens(accepted), ones, text_N)


def test_the_area_under_the_roc_is_that_of_hard_labels() -> None:
    random = torch.Generator().manual_seed(3)
    score_N, label_N = torch.randint(20, (500,), generator=random), torch.rand(500, generator=random).round()
    accepted_N, rejected_N = score_N[label_N == 1], score_N[label_N == 0]
    expected = mannwhitneyu(accepted_N.numpy(), rejected_N.numpy()).statistic / (len(accepted_N) * len(rejected_N))
    assert math.isclose(area_under_roc(score_N, label_N, torch.ones(500)), expected, abs_tol=1e-9)


def test_the_interval_of_a_head_that_knows_more_lies_above_zero() -> None:
    gain, low, high = figures_of(predicted(knowing=1)).over_entropy
    assert 0.1 < low < gain < high


def test_the_interval_of_a_head_that_knows_nothing_holds_zero() -> None:
    """A control for the test above."""
    _, low, high = figures_of(predicted(knowing=0)).over_entropy
    assert low < 0 < high


def test_tokens_that_texts_repeat_are_no_more_evidence() -> None:
    """Of ten equal tokens nine tell nothing new: the interval is about the root of ten times wider."""
    widths = [high - low for _, low, high in (figures_of(predicted(1, often)).over_entropy for often in (1, 10))]
    assert 2 < widths[1] / widths[0] < 5
