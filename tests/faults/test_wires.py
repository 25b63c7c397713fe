"""Cases 3, 6, 7, 9 and 12: what lies between the services is slow, dead, half-open, cut or corrupt."""

from __future__ import annotations

import time

import pytest

from tests.faults.conftest import Report
from tests.faults.proxy import Way
from tests.faults.system import System
from tests.faults.test_services_lost import draft_is_absent, draft_timeouts, is_unready
from tests.gateway.conftest import eventually


def nothing() -> None:
    pass


def drafted(whole: System) -> float:
    return whole.metric("gateway", "spire_draft_tokens_total")


@pytest.mark.thorough
@pytest.mark.fault(3)
def test_a_draft_too_slow_for_a_round_is_left_out_of_all_but_a_few(apart: System, report: Report) -> None:
    timeouts: list[float] = []

    def slow_down() -> None:
        timeouts.append(draft_timeouts(apart))
        apart.activations.latency = 0.5

    def heal() -> None:
        time.sleep(2)
        timeouts.append(draft_timeouts(apart))
        apart.activations.heal()

    report("3 draft slow by 1 s", apart.endure(slow_down, lambda: draft_is_absent(apart), heal))
    of_four_streams = timeouts[1] - timeouts[0]
    # Of eight or more in the two seconds.
    assert 1 <= of_four_streams <= 4 * 4


@pytest.mark.thorough
@pytest.mark.fault(6)
def test_a_verifier_that_vanished_without_a_word_is_missed_within_5_s(whole: System, report: Report) -> None:
    endured = whole.endure(whole.to_verifier.half_open, lambda: is_unready(whole), nothing)
    report("6 connection half-open", endured)
    assert endured.detection < 5


@pytest.mark.thorough
@pytest.mark.fault(7)
def test_what_a_healed_partition_lets_go_late_changes_nothing(whole: System, report: Report) -> None:
    endured = whole.endure(whole.to_verifier.hold, lambda: is_unready(whole), whole.to_verifier.heal)
    report("7 partition heals", endured)
    assert endured.goodput_after > 0


@pytest.mark.thorough
@pytest.mark.fault(9)
def test_a_round_whose_answer_is_lost_is_not_lost(whole: System, report: Report) -> None:
    """The verifier has committed tokens that the gateway never hears of."""

    def lost() -> float:
        return whole.metric("verifier", "spire_verifier_tokens_total") - whole.metric(
            "gateway", "spire_generated_tokens_total"
        )

    def lose_answers() -> None:
        whole.to_verifier.half_open(Way.ANSWERED)
        time.sleep(0.3)

    before = lost()
    endured = whole.endure(lose_answers, lambda: True, whole.to_verifier.reset)
    report("9 answer lost", endured)
    assert lost() > before


@pytest.mark.thorough
@pytest.mark.fault(12)
def test_bits_that_flip_on_the_way_to_and_from_the_draft_change_no_token(apart: System, report: Report) -> None:
    """The gateway's wire to the verifier needs TLS for that: nothing else tells a wrong token from a right one."""
    flipped = apart.activations.flipped

    def corrupt() -> None:
        for _ in range(10):
            apart.activations.corrupt()
            time.sleep(0.05)

    report("12 bits flip", apart.endure(corrupt, lambda: True, nothing))
    assert apart.activations.flipped > flipped
    assert apart.wrong(apart.ask()) == {}
    eventually(lambda: is_drafted(apart), within=30)


def is_drafted(whole: System) -> bool:
    before = drafted(whole)
    whole.ask()
    return drafted(whole) > before
