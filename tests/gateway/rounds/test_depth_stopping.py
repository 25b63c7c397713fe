"""The controller of k where drafts stop by costs, in a simulated system: what a token seems to cost and how soon drafts
stop do not run away, and tokens a second come close to those of the best fixed depth and the best fixed rule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gateway.rounds.acceptance import BlockResult
from gateway.rounds.depth import DepthController
from gateway.rounds.round_times import Load
from gateway.sequence import DEEPEST, Sequence
from spire.v1.tensor_pb2 import RULE_BLOCK, RULE_INVARIANT, Rule, Sampling
from tests.gateway.rounds.test_depth import HEAVY
from tests.marks import thoroughly

# Chances with which tokens stand: half of them are easy to guess.
EASY, HARD = 0.92, 0.45
LIMITS = [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6]


@dataclass(frozen=True)
class StoppingSystem:
    """Milliseconds of a round of one sequence that drafts and verifies so many tokens.

    `told`: how far the draft's head is right about a token: 1 knows its chance, 0 only the mean.
    """

    plain: float = 10.0
    hop: float = 2.5
    each: float = 1.1
    told: float = 0.7
    noise: float = 0.06
    # By how much the level of a machine moves from one round to the next.
    drift: float = 0.01

    def milliseconds(self, drafted: int) -> float:
        return self.plain + (self.hop + self.each * drafted if drafted else 0.0)

    def block(self, k: int, least: float, rng: random.Random) -> BlockResult:
        """The block of a round, drafted pass by pass."""
        drafted, accepted, stands = 0, 0, 1.0
        while drafted < k and (not drafted or stands >= least):
            chance = rng.choice([EASY, HARD])
            accepted += accepted == drafted and rng.random() < chance
            stands *= self.told * chance + (1 - self.told) * (EASY + HARD) / 2
            drafted += 1
        return BlockResult(k, drafted, accepted)

    def rate(self, k: int, least: float) -> float:
        """Tokens a millisecond of rounds at a depth with one rule of stopping."""
        rng = random.Random(0)
        blocks = [self.block(k, least, rng) for _ in range(6000)]
        return sum(1 + block.accepted for block in blocks) / sum(self.milliseconds(block.drafted) for block in blocks)

    def best(self) -> tuple[float, float]:
        """The rates at the best fixed depth, and with the best fixed rule of stopping."""
        fixed = max(self.rate(k, 0.0) for k in range(9))
        return fixed, max(self.rate(DEEPEST, least) for least in LIMITS)


def run(system: StoppingSystem, rounds: int, seed: int, known: int) -> tuple[float, list[tuple[int, float]]]:
    """Tokens a millisecond of the rounds behind the first `known`, noise aside; and k and rule of stopping of each."""
    controller, rng, level = DepthController(), random.Random(seed), 0.0
    tokens, milliseconds, chosen = 0, 0.0, list[tuple[int, float]]()
    for turn in range(rounds):
        load = Load(1, 256 + turn % 128)
        k = controller.choose(load, [DEEPEST])
        least = controller.least_standing(load, k) if k > 1 else 0.0
        block = system.block(k, least, rng)
        took = system.milliseconds(block.drafted)
        level += rng.gauss(0, system.drift) - 0.02 * level
        outlier = rng.uniform(2, 4) if rng.random() < 0.02 else 1.0
        seen = took * math.exp(level + rng.gauss(0, system.noise)) * outlier
        controller.observe(load, k, seen / 1000, [block] if k else [])
        chosen.append((k, least))
        if turn >= known:
            tokens, milliseconds = tokens + 1 + block.accepted, milliseconds + took
    return tokens / milliseconds, chosen


SYSTEMS: dict[str, Callable[[], StoppingSystem]] = {
    "a token costs a pass": lambda: StoppingSystem(each=1.4),
    "a token costs little": lambda: StoppingSystem(each=0.5),
    "a token costs much": lambda: StoppingSystem(each=3.0),
    "a poor head": lambda: StoppingSystem(told=0.1),
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("seed", [0, *map(thoroughly, range(1, 4))])
def test_rounds_come_close_to_the_best_depth_and_threshold(name: str, seed: int) -> None:
    system = SYSTEMS[name]()
    fixed, stopping = system.best()
    rate, chosen = run(system, 4000, seed, known=400)
    assert rate >= 0.97 * max(fixed, stopping), chosen[500::500]


def test_drafting_stops_sooner_where_a_token_costs_more() -> None:
    """A round that grows by a tenth of a plain one with each token, and one that grows by a third."""
    alone, least = Load(1, HEAVY.context), []
    for each in (0.1, 0.35):
        controller = DepthController()
        for turn in range(200):
            k = (1, 1, 4, 4)[turn % 4]
            controller.observe(alone, k, 0.01 * (1 + each * k), [BlockResult(k, k, min(k, turn % 4))])
        least.append(controller.least_standing(alone, 4))
    assert 0.05 < least[0] < least[1] - 0.1 < 0.9


def test_by_the_block_rule_drafting_goes_on_for_longer() -> None:
    """There a token may make up for earlier ones."""
    alone, controller = Load(1, HEAVY.context), DepthController()
    for turn in range(200):
        k = (1, 1, 4, 4)[turn % 4]
        controller.observe(alone, k, 0.01 * (1 + 0.2 * k), [BlockResult(k, k, min(k, turn % 4))])
    assert controller.least_standing(alone, 4, by_block=True) < controller.least_standing(alone, 4) - 0.05


@pytest.mark.parametrize(
    ("rule", "temperature", "by_block"), [(RULE_BLOCK, 0.7, True), (RULE_BLOCK, 0, False), (RULE_INVARIANT, 0.7, False)]
)
def test_texts_are_judged_by_block_where_they_are_drawn(rule: Rule, temperature: float, by_block: bool) -> None:
    sequence = Sequence("s", [1], Sampling(temperature=temperature, rule=rule), max_tokens=1)
    assert sequence.by_block == by_block


def test_drafts_of_a_batch_do_not_stop_by_costs() -> None:
    controller = DepthController()
    for turn in range(60):
        k = (1, 4)[turn % 2]
        controller.observe(HEAVY, k, 0.01 * (1 + k), [BlockResult(k, k, 1)] * 16)
    assert controller.least_standing(Load(1, HEAVY.context), 4) > 0
    assert controller.least_standing(Load(2, HEAVY.context), 4) == controller.least_standing(HEAVY, 4) == 0
