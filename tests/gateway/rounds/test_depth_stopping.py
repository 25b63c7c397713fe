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
from gateway.rounds.depth import NO_STOP, DepthController, StopRule
from gateway.rounds.round_times import Load
from gateway.sequence import DEEPEST
from tests.marks import thoroughly

# Chances with which tokens stand: half of them are easy to guess.
EASY, HARD = 0.92, 0.45
LIMITS = [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6]


@dataclass(frozen=True)
class StoppingSystem:
    """Milliseconds of a round that drafts `passes` tokens in the longest block and verifies `rows` positions.

    `told`: how far the draft's head is right about a token: 1 knows its chance, 0 only the mean.
    """

    sequences: int
    plain: float = 10.0
    hop: float = 2.5
    each_pass: float = 0.8
    each_row: float = 0.3
    told: float = 0.7
    noise: float = 0.06
    # By how much the level of a machine moves from one round to the next.
    drift: float = 0.01

    def milliseconds(self, counts: list[int]) -> float:
        passes = max(counts)
        return self.plain + (self.hop + self.each_pass * passes if passes else 0.0) + self.each_row * sum(counts)

    def blocks(self, k: int, stop: StopRule, rng: random.Random) -> list[BlockResult]:
        """The blocks of a round, drafted pass by pass."""
        drafted, accepted = [0] * self.sequences, [0] * self.sequences
        stands, alive = [1.0] * self.sequences, list(range(self.sequences)) if k else []
        for depth in range(1, k + 1):
            for at in alive:
                chance = rng.choice([EASY, HARD])
                accepted[at] += accepted[at] == drafted[at] and rng.random() < chance
                stands[at] *= self.told * chance + (1 - self.told) * (EASY + HARD) / 2
                drafted[at] = depth
            alive = [at for at in alive if stands[at] >= stop.least_standing]
            if sum(stands[at] - stop.least_standing for at in alive) < self.sequences * stop.price:
                break
        return [BlockResult(k, *counts) for counts in zip(drafted, accepted, strict=True)] if k else []

    def rate(self, k: int, stop: StopRule) -> float:
        """Tokens a millisecond of rounds at a depth with one rule of stopping."""
        rng, tokens, milliseconds = random.Random(0), 0, 0.0
        for _ in range(300 + 6000 // self.sequences):
            blocks = self.blocks(k, stop, rng)
            tokens += self.sequences + sum(block.accepted for block in blocks)
            milliseconds += self.milliseconds([block.drafted for block in blocks] or [0])
        return tokens / milliseconds

    def best(self) -> tuple[float, float]:
        """The rates at the best fixed depth, and with the best fixed rule of stopping."""
        fixed = max(self.rate(k, NO_STOP) for k in range(9))
        stops = [StopRule(least, price) for least in LIMITS for price in LIMITS]
        return fixed, max(self.rate(DEEPEST, stop) for stop in stops)


def run(system: StoppingSystem, rounds: int, seed: int, known: int) -> tuple[float, list[tuple[int, StopRule]]]:
    """Tokens a millisecond of the rounds behind the first `known`, noise aside; and k and rule of stopping of each."""
    controller, rng, level = DepthController(), random.Random(seed), 0.0
    tokens, milliseconds, chosen = 0, 0.0, list[tuple[int, StopRule]]()
    for turn in range(rounds):
        load = Load(system.sequences, 256 + turn % 128)
        k = controller.choose(load, [DEEPEST] * system.sequences)
        stop = controller.stopping(load, k) if k > 1 else NO_STOP
        blocks = system.blocks(k, stop, rng)
        took = system.milliseconds([block.drafted for block in blocks] or [0])
        level += rng.gauss(0, system.drift) - 0.02 * level
        outlier = rng.uniform(2, 4) if rng.random() < 0.02 else 1.0
        seen = took * math.exp(level + rng.gauss(0, system.noise)) * outlier
        passes = max((block.drafted for block in blocks), default=0)
        drafting = (0.8 * system.hop + system.each_pass * passes) * seen / took if passes else 0.0
        controller.observe(load, k, seen / 1000, blocks, drafting / 1000)
        chosen.append((k, stop))
        if turn >= known:
            tokens += system.sequences + sum(block.accepted for block in blocks)
            milliseconds += took
    return tokens / milliseconds, chosen


SYSTEMS: dict[str, Callable[[], StoppingSystem]] = {
    "a token costs a pass": lambda: StoppingSystem(1, each_pass=1.3, each_row=0.1),
    "arithmetic binds": lambda: StoppingSystem(4, each_row=0.9),
    "a large batch": lambda: StoppingSystem(16, plain=25, each_row=0.4),
    "a poor head": lambda: StoppingSystem(4, each_row=0.6, told=0.1),
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("seed", [0, *map(thoroughly, range(1, 4))])
def test_rounds_come_close_to_the_best_depth_and_threshold(name: str, seed: int) -> None:
    system = SYSTEMS[name]()
    fixed, stopping = system.best()
    rate, chosen = run(system, 4000, seed, known=400)
    assert rate >= 0.97 * max(fixed, stopping), chosen[500::500]
