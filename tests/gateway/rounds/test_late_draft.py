"""A draft that is late, or away: how many rounds wait for it, and that the others are as plain ones are.

Seconds are those of a clock that the test itself moves.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.circuit import Circuit
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.rounds.clock import Took
from gateway.rounds.drafting import Drafting
from gateway.rounds.messages import wire_start
from gateway.rounds.planner import Rounds
from gateway.rounds.scheduler import Scheduler
from gateway.sequence import Sequence, State
from spire.v1 import verifier_pb2
from spire.v1.tensor_pb2 import Sampling

PLAIN_SECONDS, PATIENCE = 0.003, 0.25
SEQUENCES = 4


class Verifier:
    """As far as rounds see it: it takes what is sent, and leaves a core to the gateway."""

    def __init__(self) -> None:
        info = verifier_pb2.GetInfoResponse(max_speculation_depth=16, most_sequences_ahead=4)
        self.model = SimpleNamespace(info=info)
        self.asked: list[verifier_pb2.RoundsRequest] = []

    async def ask(self, request: verifier_pb2.RoundsRequest, seconds: float) -> Any:
        self.asked.append(request)
        return Mock()


class Draft:
    """As far as Drafting sees it: left alone for as long as its circuit says whenever it was late."""

    in_verifier = False

    def __init__(self) -> None:
        self.id = "draft"
        self.info = SimpleNamespace(draft_id=self.id, max_speculation_depth=16)
        self.circuit, self.up, self.away_until = Circuit(), True, 0.0
        self.now = 0.0

    def late(self) -> None:
        self.circuit.late()
        self.up, self.away_until = False, self.now + self.circuit.seconds

    def at(self, now: float) -> None:
        self.now = now
        self.up = now >= self.away_until


def running(scheduler: Scheduler) -> list[Sequence]:
    """Four that decode, k left to the gateway."""
    for number in range(SEQUENCES):
        sequence = Sequence(f"s{number}", [1, 2, 3], Sampling(), max_tokens=10**6, automatic=True, output=[4])
        sequence.state, sequence.draft_id, sequence.life = State.RUNNING, "draft", 1
        scheduler.running[sequence.wire_id] = sequence
    return list(scheduler.running.values())


def answer_to(asked: dict[str, int], why: verifier_pb2.Undrafted) -> verifier_pb2.VerifyBatchResult:
    results = [verifier_pb2.VerifyResult(sequence_id=wire_id, undrafted=why) for wire_id in asked]
    return verifier_pb2.VerifyBatchResult(results=results)


async def waits_beside_a_draft_that_is_always_late(seconds: float) -> int:
    """Rounds that waited for it in vain."""
    draft, metrics = Draft(), Metrics()
    drafting = Drafting(draft, Verifier(), GatewayConfig(), metrics)  # type: ignore[arg-type]
    batch = running(Scheduler(SEQUENCES, SEQUENCES))
    now, waits = 0.0, 0
    while now < seconds:
        draft.at(now)
        load = drafting.choose(batch, prefilling=False)
        plan = drafting.ask(batch)
        for sequence in batch:
            drafting.pause(sequence)
            sequence.output.append(5)
        waited = bool(plan.asked)
        waits += waited
        took = PLAIN_SECONDS + PATIENCE * waited
        now += took
        draft.at(now)
        answer = answer_to(plan.asked, verifier_pb2.UNDRAFTED_LATE)
        drafting.settle(plan, answer)
        shown = drafting.shown_by(batch, plan, answer)
        timings = verifier_pb2.Timings(forward_seconds=PLAIN_SECONDS / 2, total_seconds=PLAIN_SECONDS)
        drafting.learn(load, shown, plan, timings, Took(took, took, 0.0, took))
    return waits


@pytest.mark.fault(3)
async def test_a_draft_that_is_always_late_is_waited_for_by_few_rounds() -> None:
    """By the circuit alone six would wait in 10 s, one after each of its pauses, which double."""
    assert 1 <= await waits_beside_a_draft_that_is_always_late(10.0) <= 4


def test_whoever_was_late_is_left_alone_and_not_who_has_taken_its_place() -> None:
    draft = Draft()
    drafting = Drafting(draft, Verifier(), GatewayConfig(k=4), Metrics())  # type: ignore[arg-type]
    batch = running(Scheduler(SEQUENCES, SEQUENCES))
    for sequence in batch:
        sequence.k, sequence.automatic = 4, False
    plan = drafting.ask(batch)
    draft.id = "another"
    drafting.settle(plan, answer_to(plan.asked, verifier_pb2.UNDRAFTED_LATE))
    assert draft.circuit.seconds == 0
    assert plan.lost
    draft.id = "draft"
    plan = drafting.ask(batch)
    drafting.settle(plan, answer_to(plan.asked, verifier_pb2.UNDRAFTED_LATE))
    assert draft.circuit.seconds > 0


def test_while_the_draft_is_idle_starts_publish_nothing_to_it() -> None:
    draft, paused = Draft(), []
    drafting = Drafting(draft, Verifier(), GatewayConfig(), Metrics())  # type: ignore[arg-type]
    batch = running(Scheduler(SEQUENCES, SEQUENCES))
    for plain_rounds in (0, 7, 8):
        drafting._plain_rounds = plain_rounds
        paused.append([drafting.pause(sequence) for sequence in batch])
    batch[0].automatic = False  # its k was asked for
    assert drafting.pause(batch[0]) is False
    assert paused == [[False] * SEQUENCES, [False] * SEQUENCES, [True] * SEQUENCES]
    assert wire_start(batch[1]).paused


@pytest.mark.fault(3)
@pytest.mark.parametrize("k", [None, 4])
async def test_while_the_draft_is_away_rounds_are_sent_ahead_like_plain_ones(k: int | None) -> None:
    draft, verifier, config, metrics = Draft(), Verifier(), GatewayConfig(k=k), Metrics()
    draft.up = False
    scheduler = Scheduler(SEQUENCES, SEQUENCES)
    drafting = Drafting(draft, verifier, config, metrics)  # type: ignore[arg-type]
    for sequence in running(scheduler):
        sequence.k, sequence.automatic = k or 0, k is None
    rounds = Rounds(scheduler, drafting, verifier, config)  # type: ignore[arg-type]
    current = rounds.take()
    assert current is not None
    await rounds.send(current)
    assert len(verifier.asked) == 2
    assert all(item.paused and not item.k for request in verifier.asked for item in request.verify.items)
    assert drafting.shown_by(current.sent, current.plan, verifier_pb2.VerifyBatchResult()).depth == 0
    assert metrics.fallbacks["draft_absent"] == (2 * SEQUENCES if k else 0)
