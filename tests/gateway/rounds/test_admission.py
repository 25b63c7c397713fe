"""What is promised to an API key and to a queue is kept under any history."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gateway.errors import BadParameter, OverQuota
from gateway.rounds.admission import Budget, DrainRate, Quotas, seconds_allowed
from spire.errors import InvalidRequest

history = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=60)


@given(history=history, per_minute=st.integers(50, 500))
def test_nobody_gets_more_than_a_minute_at_once_and_the_rate_after_it(
    history: list[tuple[float, int]], per_minute: int
) -> None:
    budget, now, had = Budget(per_minute, 0.0), 0.0, 0
    for pause, amount in history:
        now += pause
        if budget.seconds_until(amount, now) == 0:
            budget.take(amount)
            had += amount
        assert had <= per_minute * (1 + now / 60) + 1e-6


@given(taken=st.integers(1, 100), wanted=st.integers(1, 100))
def test_who_waits_as_long_as_told_gets_it(taken: int, wanted: int) -> None:
    budget = Budget(100, 0.0)
    budget.take(taken)
    wait = budget.seconds_until(wanted, 0.0)
    assert budget.seconds_until(wanted, wait) == pytest.approx(0, abs=1e-9)
    assert wait == 0 or budget.seconds_until(wanted, wait * 0.99) > 0


@given(promised=st.integers(0, 1000), share=st.floats(0, 1))
def test_what_a_request_did_not_use_is_given_back_once(promised: int, share: float) -> None:
    quotas, used = Quotas(None, 1000), int(promised * share)
    charge = quotas.charge("alice", promised, 0.0)
    charge.settle(used)
    charge.settle(0)
    quotas.charge("alice", 1000 - used, 0.0)
    with pytest.raises(OverQuota, match="1000 tokens a minute"):
        quotas.charge("alice", 1, 0.0)


def test_each_key_has_requests_and_tokens_of_its_own() -> None:
    quotas = Quotas(2, 100)
    quotas.charge("alice", 10, 0.0)
    quotas.charge("alice", 10, 0.0)
    with pytest.raises(OverQuota, match="2 requests a minute") as refused:
        quotas.charge("alice", 10, 0.0)
    assert refused.value.retry_after == 30
    quotas.charge("bob", 90, 0.0)
    with pytest.raises(OverQuota, match="100 tokens a minute") as refused:
        quotas.charge("bob", 40, 0.0)
    assert refused.value.retry_after == 18
    quotas.charge("bob", 40, 18.0)


def test_what_was_refused_for_its_tokens_is_no_request() -> None:
    quotas = Quotas(2, 100)
    quotas.charge("alice", 90, 0.0)
    with pytest.raises(OverQuota):
        quotas.charge("alice", 20, 0.0)
    quotas.charge("alice", 10, 0.0)


def test_more_than_a_key_may_ever_have_is_no_matter_of_time() -> None:
    with pytest.raises(InvalidRequest, match="up to 101 tokens are asked for at once, and a key may have 100"):
        Quotas(None, 100).charge("alice", 101, 0.0)


def test_where_no_keys_are_asked_for_nobody_is_limited() -> None:
    quotas = Quotas(1, 1000)
    charges = [quotas.charge(None, 1000, 0.0) for _ in range(10)]
    assert len(charges) == 10
    quotas.charge("alice", 1000, 0.0)
    with pytest.raises(OverQuota):
        quotas.charge("alice", 1000, 0.0)


def test_the_queue_wait_follows_the_rate_of_others_first_tokens() -> None:
    rate = DrainRate()
    assert rate.seconds_for(3, now=0.0) is None
    assert rate.retry_after(3, now=0.0) == 1
    for moment in range(11):
        rate.started(2.0 * moment)
    assert rate.seconds_for(3, now=20.0) == 6.0
    assert rate.retry_after(3, now=20.0) == 6
    assert rate.retry_after(1000, now=20.0) == 2000, "never less than what is known to lie ahead"
    assert rate.retry_after(3, now=20.0, at_least=40.2) == 41, "at least one step is"
    assert rate.seconds_for(3, now=44.0) == 12.0, "nobody has got any for long"
    rate.emptied()
    assert rate.seconds_for(3, now=44.0) is None, "idle time is no slowness"


@pytest.mark.parametrize(("asked", "seconds"), [("2.5", 2.5), ("1e9", 60.0), (" 7 ", 7.0)])
def test_a_timeout_may_be_asked_for_up_to_the_servers_own(asked: str, seconds: float) -> None:
    assert seconds_allowed({"X-Request-Timeout": asked}, 60.0) == seconds
    assert seconds_allowed({}, 60.0) == 60.0


@pytest.mark.parametrize("asked", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_is_none_is_refused(asked: str) -> None:
    with pytest.raises(BadParameter, match="X-Request-Timeout"):
        seconds_allowed({"X-Request-Timeout": asked}, 60.0)
