"""Cases 1 to 4 for as long as they last outside: minutes of kills, half a minute of silence, a draft that lags.

Only `make faults` runs these. The bundled pair serves, because an untrained draft has no speed to lose.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import pytest

from tests.faults.conftest import Report
from tests.faults.history import Body, Load, bodies
from tests.faults.system import Endured, System, system
from tests.faults.test_services_lost import draft_is_absent, is_unready
from tests.gateway.conftest import eventually
from tests.paths import ROOT

MODELS = ROOT / "models"
MINUTES = float(os.environ.get("SPIRE_FAULTS_MINUTES", "10"))
# Of runs of a second each, whose ratios differ by a tenth. By a sign test, more than `MOST_BELOW` of them are below the
# bound less than once in a hundred times where the median is at it.
PAIRS, MOST_BELOW = 60, 39
BETWEEN_KILLS = 10.0
# Every third kill is the verifier's, too.
DRAFT_KILLS_PER_VERIFIER_KILL = 3
# Of the kills that the minutes have room for: the round of a verifier's kill takes longer.
LEAST_SHARE_OF_KILLS = 0.75
# Seconds from when a killed draft is connected again: how long a process takes to start is the machine's. The median is
# what is promised. A single return may take longer where the machine does something else and the draft is late.
TAU_USUALLY_BACK_WITHIN, TAU_BACK_WITHIN = 5.0, 20.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 900)]


@pytest.fixture(scope="module")
def bundled() -> Iterator[System]:
    """The bundled pair, k chosen for every round."""
    with system(MODELS / "target", MODELS / "draft", apart=True) as whole:
        yield whole


@pytest.mark.fault(2)
def test_a_draft_frozen_for_half_a_minute_costs_two_rounds_at_most(whole: System, report: Report) -> None:
    timeouts = whole.metric("gateway", "spire_fallbacks_total", reason="draft_timeout")
    process = whole.draft.process

    def thaw_late() -> None:
        time.sleep(30)
        process.send_signal(signal.SIGCONT)

    freeze = lambda: process.send_signal(signal.SIGSTOP)  # noqa: E731
    endured = whole.endure(freeze, lambda: draft_is_absent(whole), thaw_late, patience=60)
    report("2 draft frozen for 30 s", endured)
    of_four_streams = whole.metric("gateway", "spire_fallbacks_total", reason="draft_timeout") - timeouts
    assert 1 <= of_four_streams <= 2 * 4


@pytest.mark.fault(3)
@pytest.mark.parametrize("milliseconds", [50, 200, 1000])
def test_a_lagging_draft_costs_at_most_a_twentieth_of_plain_decoding(bundled: System, milliseconds: int) -> None:
    bundled.activations.latency = milliseconds / 2000
    try:
        for _ in range(3):
            rate(bundled, {})
        ratios = [of_plain(bundled, first=pair % 2 == 0) for pair in range(PAIRS)]
    finally:
        bundled.activations.heal()
        eventually(bundled.is_whole, within=30)
    print(f"a draft {milliseconds} ms late: {median(ratios):.3f} of plain decoding, of", *(f"{r:.2f}" for r in ratios))
    assert sum(ratio < 0.95 for ratio in ratios) <= MOST_BELOW, sorted(ratios)


def of_plain(whole: System, first: bool) -> float:
    """Tokens a second over those of plain decoding. Who goes first changes: machines become slower and faster."""
    plainly: Body = {"speculation": {"draft": "off"}}
    if first:
        speculating = rate(whole, {})
        return speculating / rate(whole, plainly)
    plain = rate(whole, plainly)
    return rate(whole, {}) / plain


def rate(whole: System, more: Body) -> float:
    """Tokens a second of four streams."""
    began = time.monotonic()
    with Load(whole.url, [body | more for body in bodies(8) if body["temperature"] == 0]) as load:
        pass
    assert not [record.error for record in load.records if record.error]
    return sum(len(record.tokens) for record in load.records) / (time.monotonic() - began)


@pytest.mark.fault(1, 4)
def test_minutes_of_kills_cost_no_request_no_token_and_no_speed_for_long(report: Report) -> None:
    with system(MODELS / "target", MODELS / "draft", gateway_options=["--k", "4"]) as whole:
        whole.learn(bodies(16))
        returns: list[float] = []
        with Load(whole.url, [record.body for record in whole.expected.values()], repeat=True) as load:
            eventually(lambda: load.flowing, within=60)
            usual = tau(whole, 10)
            end = time.monotonic() + 60 * MINUTES
            for number in range(1, 10**6):
                began = time.monotonic()
                if began > end:
                    break
                if number % DRAFT_KILLS_PER_VERIFIER_KILL == 0:
                    report("4 verifier killed, for minutes", kill(whole, load, "verifier"))
                killed, endured = time.monotonic(), kill(whole, load, "draft")
                report("1 draft killed, for minutes", endured)
                returns.append(back(whole, 0.95 * usual) - killed - endured.recovery)
                assert returns[-1] < TAU_BACK_WITHIN, f"τ of {usual:.2f} does not return"
                time.sleep(max(0.0, began + BETWEEN_KILLS - time.monotonic()))
        assert median(returns) < TAU_USUALLY_BACK_WITHIN, sorted(returns)
        assert whole.wrong(load.records) == {}
        assert whole.leaks() == {}
        assert len(returns) >= LEAST_SHARE_OF_KILLS * 60 * MINUTES / BETWEEN_KILLS
        times = f"after {median(returns):.1f} s (median) and {max(returns):.1f} s (longest)"
        kills = f"{len(returns)} kills, τ {usual:.2f}, back {times}"
        print(f"{kills}; {load.refusals} refusals while unready")


def kill(whole: System, load: Load, name: str) -> Endured:
    """Until it is connected again; its goodput is that of the seconds before, during and after."""
    began, asked = time.monotonic(), len(load.records)
    getattr(whole, name).kill()
    eventually(lambda: is_unready(whole) if name == "verifier" else draft_is_absent(whole))
    seen = time.monotonic()
    whole.revive(name)
    eventually(whole.is_whole, within=60)
    over = time.monotonic()
    time.sleep(1)
    goodput = [load.goodput(began - 1, began), load.goodput(began, over), load.goodput(over, over + 1)]
    return Endured(len(load.records) - asked, seen - began, over - began, *goodput)


def tau(whole: System, seconds: float) -> float:
    """Tokens that a sequence gets in a round, mean over the next seconds: also rounds without a draft count."""
    before = counts(whole)
    time.sleep(seconds)
    return before.tau(counts(whole))


def back(whole: System, enough: float) -> float:
    """The moment when τ of the second before was enough, or none was in the time that there is."""
    seen = [counts(whole)]
    while seen[-1].moment < seen[0].moment + TAU_BACK_WITHIN:
        time.sleep(0.1)
        seen.append(counts(whole))
        before = [one for one in seen if one.moment <= seen[-1].moment - 1]
        if before and before[-1].tau(seen[-1]) >= enough:
            break
    return seen[-1].moment


@dataclass(frozen=True)
class Counts:
    """Of the gateway, at a moment: tokens generated, and rounds times their sequences."""

    moment: float
    tokens: float
    blocks: float

    def tau(self, later: Counts) -> float:
        return (later.tokens - self.tokens) / max(1.0, later.blocks - self.blocks)


def counts(whole: System) -> Counts:
    tokens = whole.metric("gateway", "spire_generated_tokens_total")
    return Counts(time.monotonic(), tokens, whole.metric("gateway", "spire_round_sequences_sum"))
