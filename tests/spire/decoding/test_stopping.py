"""A draft may stop where it likes if it looks at verified draft tokens alone; any other rule bends the output. Where
it should stop follows from what one more token brings.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from torch import Tensor

from spire.decoding.sampling import Rule
from spire.decoding.stopping import standing_for
from spire.decoding.verification import SparseDistribution
from tests.spire.decoding.test_verification import ALPHA, Stop, chain, every_rule, generate, p_values


def after_an_even_token(p_BTV: Tensor, draft_BK: Tensor, q: SparseDistribution | None) -> Tensor:
    """As a stop head does: the token that it judged is verified."""
    return (before_the_first(draft_BK % 2 == 0) + 1).clamp(max=draft_BK.shape[1])


def before_an_even_token(p_BTV: Tensor, draft_BK: Tensor, q: SparseDistribution | None) -> Tensor:
    """A rule that must fail: it takes the token back that it judged."""
    return before_the_first(draft_BK % 2 == 0)


def before_a_token_that_p_dislikes(p_BTV: Tensor, draft_BK: Tensor, q: SparseDistribution | None) -> Tensor:
    """A rule that must fail: it looks at p, and spares the target the tokens that it could reject."""
    assert q is not None
    drawn_with_BK = q.probs_BKM.gather(2, draft_BK[..., None])[..., 0]
    return before_the_first(p_BTV[:, :-1].gather(2, draft_BK[..., None])[..., 0] < drawn_with_BK)


def before_the_first(true_BK: Tensor) -> Tensor:
    return (~true_BK).long().cumprod(dim=1).sum(dim=1)


def least_p_value(stop: Stop, rule: Rule) -> float:
    p_VV, q_VV = chain(3, 6), chain(4, 6)
    return min(p_values(generate(p_VV, q_VV, 40_000, 4, 3, rule, stop=stop), p_VV))


@every_rule
def test_stopping_by_verified_draft_tokens_does_not_bend_the_output(rule: Rule) -> None:
    assert least_p_value(after_an_even_token, rule) > ALPHA


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK], ids=["rejection", "block"])
@pytest.mark.parametrize("stop", [before_an_even_token, before_a_token_that_p_dislikes])
def test_stopping_by_what_is_not_verified_bends_the_output(stop: Stop, rule: Rule) -> None:
    """A control for the test above."""
    assert least_p_value(stop, rule) < ALPHA


@given(standing=st.floats(0.01, 1), rate=st.floats(0.5, 0.99))
def test_a_block_stands_with_what_brings_the_gain(standing: float, rate: float) -> None:
    by_rejection, by_block = standing * rate, standing - (1 - rate) * standing**2
    assert standing_for(by_rejection, rate, False) == pytest.approx(standing)
    assert standing_for(by_block, rate, True) == pytest.approx(standing, rel=1e-3)
    assert standing_for(by_rejection, rate, True) <= standing * (1 + 1e-3)
