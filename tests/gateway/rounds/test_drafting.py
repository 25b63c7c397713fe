"""What a round teaches the choice of k."""

from __future__ import annotations

from unittest.mock import Mock

from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.rounds.acceptance import BlockResult
from gateway.rounds.clock import Took
from gateway.rounds.drafting import Drafting, DraftPlan, Evidence
from gateway.rounds.round_times import Load
from spire.v1 import verifier_pb2

LOAD, SHOWN = Load(1, 1900.0, prefilling=True), Evidence(4, [BlockResult(4, 4, 2)])


def taught(*rounds: tuple[float, float]) -> float:
    """How much rounds are thought to differ, after some of so many seconds, so many of them in a queue."""
    drafting = Drafting(None, Mock(), GatewayConfig(), Metrics())
    for seconds, queued in rounds:
        timings = verifier_pb2.Timings(forward_seconds=0.005, total_seconds=0.005)
        drafting.learn(LOAD, SHOWN, DraftPlan(), timings, Took(seconds, seconds, queued, seconds))
    (times,) = drafting._depths.times.values()
    return times.noise


def test_a_round_that_waited_longer_than_it_took_teaches_no_time() -> None:
    usual = [(0.02, 0.001)] * 20
    assert taught(*usual, (0.02, 0.045), *usual) < 1.01 * taught(*usual, *usual)
    assert taught(*usual, (0.06, 0.001), *usual) > 1.01 * taught(*usual, *usual)
