"""The controller of k, in a simulated system: it stays close to the best fixed depth, whatever the system is like.

The system draws its own constants: what a target and a draft pass cost, how both grow with the batch, what is accepted.
A round's time has noise and outliers; the controller is judged by the means that it cannot see.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean

import pytest

from gateway.rounds.acceptance import Acceptance, BlockResult
from gateway.rounds.depth import PROBE_SHARE, DepthController
from gateway.rounds.round_times import Load, RoundTimes
from gateway.sequence import DEEPEST
from tests.marks import thoroughly

DEPTHS = range(DEEPEST + 1)


@dataclass
class System:
    """Milliseconds of its parts, and the chance that a draft token is accepted after those before it.

    `late`: what the answer to a drafted round behind which a plain one follows comes too late, and so the next one's
    time too short.
    """

    weights: float = 8.0
    target_row: float = 0.1
    cache: float = 0.0005
    hop: float = 2.0
    draft_pass: float = 1.0
    draft_row: float = 0.02
    accepted: float = 0.8
    bends: list[float] = field(default_factory=lambda: [0.0] * len(DEPTHS))
    noise: float = 0.06
    outliers: float = 0.03
    late: float = 0.0

    def seconds(self, k: int, load: Load) -> float:
        size = load.sequences
        verify = self.weights + self.target_row * size * (k + 1) + self.cache * size * load.context
        draft = self.hop + k * (self.draft_pass + self.draft_row * size) if k else 0.0
        return (1 + verify + draft) / 1000 * (1 + self.bends[k])

    def tau(self, k: int) -> float:
        return sum(self.accepted**i for i in range(k + 1))

    def rate(self, k: int, load: Load) -> float:
        return load.sequences * self.tau(k) / self.seconds(k, load)

    def best(self, load: Load) -> float:
        return max(self.rate(k, load) for k in DEPTHS)

    def round(self, k: int, load: Load, rng: random.Random) -> tuple[float, list[BlockResult]]:
        """What a gateway would see of one round."""
        seconds = self.seconds(k, load) * math.exp(rng.gauss(0, self.noise))
        seconds *= rng.uniform(2, 8) if rng.random() < self.outliers else 1
        blocks = [BlockResult(k, k, self._accept(k, rng)) for _ in range(load.sequences)] if k else []
        return seconds, blocks

    def _accept(self, k: int, rng: random.Random) -> int:
        return next((n for n in range(k) if rng.random() >= self.accepted), k)


# Pays (2.5 times at k of 5 to 7), and loses whatever the depth.
PAYS = System(target_row=0.02, cache=0.002, draft_pass=0.7, draft_row=0.005, accepted=0.85)
LOSES = System(target_row=0.3, draft_pass=4.0, draft_row=0.1, accepted=0.4)
HEAVY = Load(16, 512)


def drawn(rng: random.Random) -> tuple[System, Load]:
    """Any system under any load."""
    between = rng.uniform
    system = System(
        weights=between(2, 20),
        target_row=between(0.01, 0.4),
        cache=between(0.0001, 0.005),
        hop=between(0.2, 4),
        draft_pass=between(0.3, 4),
        draft_row=between(0.002, 0.15),
        accepted=between(0.2, 0.95),
        bends=[between(-0.02, 0.02) for _ in DEPTHS],
        noise=between(0.01, 0.1),
    )
    return system, Load(rng.choice([1, 4, 16, 64]), rng.choice([128.0, 512.0, 1900.0]))


def run(
    system: System,
    load: Load,
    choose: Callable[[Load, list[int]], int] | DepthController,
    rounds: int,
    seed: int = 0,
) -> list[int]:
    """The depths of some rounds in which all sequences grow by what they were given."""
    rng, context, depths, before = random.Random(seed), load.context, list[int](), 0
    for _ in range(rounds):
        now = Load(load.sequences, context)
        rooms = [64] * now.sequences
        k = choose.choose(now, rooms) if isinstance(choose, DepthController) else choose(now, rooms)
        seconds, blocks = system.round(k, now, rng)
        if (k > 0) != (before > 0):
            seconds += (1 if k else -1) * system.late / 1000
        if isinstance(choose, DepthController):
            choose.observe(now, k, seconds, blocks)
        depths.append(k)
        before = k
        context += system.tau(k) / 16
    return depths


def share_of_best(system: System, load: Load, depths: list[int]) -> float:
    """Tokens a second of these rounds over those of the best fixed depth, noise aside."""
    tokens = sum(load.sequences * system.tau(k) for k in depths)
    return tokens / sum(system.seconds(k, load) for k in depths) / system.best(load)


def plainly_loses_nothing(choose: Callable[[Load, list[int]], int] | DepthController) -> bool:
    depths = run(LOSES, HEAVY, choose, rounds=400)
    return share_of_best(LOSES, HEAVY, depths[100:]) >= 0.97


@pytest.mark.parametrize("part", [0, *map(thoroughly, range(1, 4))])
def test_a_system_runs_within_3_percent_of_its_best_fixed_depth(part: int) -> None:
    """The mean of four controllers, each behind its own 300 rounds: what a single one has seen may be unlucky.

    All of these systems do. Of 164 others, 80 of them with values at the ends of their ranges, one did not (0.96): one
    of its four controllers stayed with plain rounds where k = 1 was 15 % better.
    """
    rng = random.Random(part)
    for _ in range(10):
        system, load = drawn(rng)
        seed = rng.randrange(2**16)
        assert fmean(share_once_known(system, load, seed + at) for at in range(4)) >= 0.97, (system, load, seed)


def share_once_known(system: System, load: Load, seed: int) -> float:
    controller = DepthController()
    run(system, load, controller, rounds=300, seed=seed)
    return share_of_best(system, load, run(system, load, controller, rounds=300, seed=seed + 1))


def test_where_speculation_loses_it_is_switched_off() -> None:
    assert LOSES.best(HEAVY) == LOSES.rate(0, HEAVY)
    assert plainly_loses_nothing(DepthController())


def test_where_drafting_loses_a_little_it_is_seldom_tried() -> None:
    loses_a_little = System(target_row=0.7, cache=0.0007, hop=3.0, draft_pass=3.5, accepted=0.55)
    assert 0.88 < loses_a_little.rate(1, HEAVY) / loses_a_little.rate(0, HEAVY) < 0.94
    tried = []
    for seed in range(4):
        controller = DepthController()
        run(loses_a_little, HEAVY, controller, rounds=2000, seed=seed)
        tried += run(loses_a_little, HEAVY, controller, rounds=2000, seed=seed + 1)
    # Two rounds of every 192, and a few by mistake.
    assert sum(k > 0 for k in tried) < 0.02 * len(tried)


def test_a_fixed_depth_of_4_would_lose_there() -> None:
    assert not plainly_loses_nothing(lambda load, rooms: 4)


def test_where_speculation_pays_it_is_deep_from_the_start() -> None:
    depths = run(PAYS, HEAVY, DepthController(), rounds=40)
    assert share_of_best(PAYS, HEAVY, depths) >= 0.93


def test_looking_at_other_depths_costs_little() -> None:
    controller = DepthController()
    run(PAYS, HEAVY, controller, rounds=200)
    best = PAYS.best(HEAVY)
    depths = run(PAYS, HEAVY, controller, rounds=1000, seed=1)
    assert len(set(depths)) > 1
    lost = sum(PAYS.seconds(k, HEAVY) * max(0.0, 1 - PAYS.rate(k, HEAVY) / best) for k in depths if k == 0)
    assert lost <= 2 * PROBE_SHARE * sum(PAYS.seconds(k, HEAVY) for k in depths)


class SlowStart(System):
    """Its first round takes ten times as long as such a round takes."""

    rounds = 0

    def round(self, k: int, load: Load, rng: random.Random) -> tuple[float, list[BlockResult]]:
        seconds, blocks = super().round(k, load, rng)
        self.rounds += 1
        return seconds * (10 if self.rounds == 1 else 1), blocks


# A draft that answers 60 ms late.
LATE = [replace(PAYS, hop=60.0), System(hop=60.0)]
FEW_SEEDS = range(3)


def looks(system: System, seed: int, beside: int = 0, prefilling_every: int | None = None) -> int:
    """Drafted rounds of 3,000 where the draft is late; after every hundred come some of nobody's that is automatic."""
    controller, rng, count = DepthController(), random.Random(seed), 0
    load = Load(4, 200.0)
    run(system, load, controller, rounds=300, seed=seed)
    for at in range(3000):
        now = replace(load, prefilling=prefilling_every is not None and at % prefilling_every == 0)
        k = controller.choose(now, [64] * 4)
        controller.observe(now, k, *system.round(k, now, rng))
        count += k > 0
        for _ in range(beside if at % 100 == 99 else 0):
            controller.observe(replace(now, automatic=False), 0, *system.round(0, now, rng))
    return count


@pytest.mark.thorough
def test_rounds_that_leave_nothing_to_the_controller_pay_for_no_looks() -> None:
    alone = sum(looks(system, seed) for system in LATE for seed in FEW_SEEDS)
    beside = sum(looks(system, seed, beside=300) for system in LATE for seed in FEW_SEEDS)
    assert 0 < beside <= 2 * alone


@pytest.mark.thorough
def test_a_look_that_ends_under_a_neighbouring_load_counts_as_answered() -> None:
    alike = sum(looks(system, seed) for system in LATE for seed in FEW_SEEDS)
    changing = sum(looks(system, seed, prefilling_every=8) for system in LATE for seed in FEW_SEEDS)
    assert 0 < changing <= 2 * alike


@pytest.mark.parametrize("seed", range(5))
def test_a_first_round_that_is_slow_by_chance_misleads_nobody(seed: int) -> None:
    system = SlowStart(**PAYS.__dict__)
    assert share_of_best(system, HEAVY, run(system, HEAVY, DepthController(), rounds=100, seed=seed)[20:]) >= 0.95


def test_a_machine_that_stalls_and_goes_on_makes_rounds_no_less_credible() -> None:
    controller = DepthController()
    run(PAYS, HEAVY, controller, rounds=200)
    before = controller.times[HEAVY.cell].noise
    run(System(**(PAYS.__dict__ | {"bends": [29.0] * len(DEPTHS)})), HEAVY, controller, rounds=30)
    run(PAYS, HEAVY, controller, rounds=20)
    assert controller.times[HEAVY.cell].noise < 2 * before


@pytest.mark.parametrize("seed", range(5))
def test_a_change_between_plain_and_drafted_rounds_misleads_nobody(seed: int) -> None:
    """A plain round of 4.6 ms seems to take 1.6 behind a drafted one, a drafted one 3 ms more behind a plain one."""
    system = System(weights=2.5, target_row=0.045, cache=0.0001, hop=1, draft_pass=0.9, accepted=0.83, late=3.0)
    assert 1.2 < system.best(HEAVY) / system.rate(0, HEAVY) < 1.4
    assert share_of_best(system, HEAVY, run(system, HEAVY, DepthController(), rounds=300, seed=seed)[50:]) >= 0.97


def test_a_load_changing_every_few_rounds_loses_nothing_to_plain_decoding() -> None:
    """Speculation pays for few sequences and loses for many."""
    system = System(weights=15, target_row=0.6, hop=1, draft_pass=0.8, draft_row=0.3, accepted=0.75)
    few, many = Load(1, 512), Load(64, 512)
    assert system.rate(0, few) < 0.8 * system.best(few)
    assert system.rate(0, many) == system.best(many)
    controller = DepthController()
    for turn in range(30):
        for load in (few, many):
            depths = run(system, load, controller, rounds=20, seed=turn)
            if turn >= 6:
                assert share_of_best(system, load, depths) >= 0.9 * system.rate(0, load) / system.best(load)
    assert share_of_best(system, few, run(system, few, controller, 100)) >= 0.97
    assert share_of_best(system, many, run(system, many, controller, 100)) >= 0.97


def test_a_workload_that_becomes_hard_and_easy_again_is_followed() -> None:
    controller = DepthController()
    easy, hard = PAYS, System(**(PAYS.__dict__ | {"accepted": 0.05}))
    run(easy, HEAVY, controller, rounds=200)
    assert share_of_best(hard, HEAVY, run(hard, HEAVY, controller, rounds=300)[100:]) >= 0.95
    assert share_of_best(easy, HEAVY, run(easy, HEAVY, controller, rounds=600)[300:]) >= 0.95


def of_plain(choose: Callable[[Load, list[int]], int] | DepthController, system: System, seed: int) -> list[float]:
    """Tokens a second over those of plain decoding, of four texts of 200 tokens each time, which grow from nothing."""
    rng, ratios = random.Random(seed), []
    for _ in range(8):
        context, seconds, plainly = 20.0, 0.0, 0.0
        while context < 220:
            now = Load(4, context)
            k = choose.choose(now, [64] * 4) if isinstance(choose, DepthController) else choose(now, [64] * 4)
            took, blocks = system.round(k, now, rng)
            if isinstance(choose, DepthController):
                choose.observe(now, k, took, blocks)
            gained = 1 + sum(block.accepted for block in blocks) / 4
            context += gained
            seconds += system.seconds(k, now)
            plainly += gained * system.seconds(0, now)
        ratios.append(plainly / seconds)
    return ratios


@pytest.mark.parametrize("weights", [8.0, thoroughly(30.0)])
@pytest.mark.parametrize("milliseconds", [50.0, thoroughly(200.0), 240.0])
def test_a_draft_that_answers_late_costs_no_more_than_a_twentieth(milliseconds: float, weights: float) -> None:
    late = System(weights=weights, hop=milliseconds)
    assert fmean(ratio for seed in range(6) for ratio in of_plain(DepthController(), late, seed)[2:]) >= 0.95
    if milliseconds > 50:
        assert fmean(of_plain(lambda now, rooms: 4, late, seed=0)) < 0.8


@pytest.mark.thorough
@pytest.mark.parametrize("milliseconds", [50.0, thoroughly(200.0)])
def test_a_draft_that_was_slow_for_long_is_soon_tried_again(milliseconds: float) -> None:
    healthy = System(**(PAYS.__dict__ | {"cache": 0.0}))
    controller, slow = DepthController(), System(**(healthy.__dict__ | {"hop": milliseconds}))
    depths = run(slow, HEAVY, controller, rounds=12_000)
    assert share_of_best(slow, HEAVY, depths) >= 0.97
    depths = run(healthy, HEAVY, controller, rounds=6_000)
    tried = next(at for at, k in enumerate(depths) if k)
    assert tried * healthy.seconds(0, HEAVY) < 2 * 2 * milliseconds / 1000 / PROBE_SHARE
    assert share_of_best(healthy, HEAVY, depths[tried + 300 :]) >= 0.95


@pytest.mark.parametrize("milliseconds", [thoroughly(50.0), thoroughly(200.0), 1000.0])
def test_a_draft_that_becomes_slow_is_left_within_a_few_rounds(milliseconds: float) -> None:
    healthy = System(**(PAYS.__dict__ | {"cache": 0.0}))
    slow = System(**(healthy.__dict__ | {"hop": milliseconds}))
    for seed in range(4):
        controller = DepthController()
        assert sum(k > 0 for k in run(healthy, HEAVY, controller, rounds=1000, seed=seed)[-100:]) > 90
        depths = run(slow, HEAVY, controller, rounds=600, seed=seed)
        assert sum(k > 0 for k in depths[:50]) < 10
        assert share_of_best(slow, HEAVY, depths[50:]) >= 0.95


def test_a_machine_that_becomes_slower_as_a_whole_changes_no_choice() -> None:
    controller = DepthController()
    run(PAYS, HEAVY, controller, rounds=200)
    slow = System(**(PAYS.__dict__ | {"bends": [2.0] * len(DEPTHS)}))
    assert share_of_best(slow, HEAVY, run(slow, HEAVY, controller, rounds=100)) >= 0.97


@pytest.mark.parametrize(("of_sequences", "of_context"), [(0.0, 0.0), (0.3, 0.4), (0.9, 0.8)])
def test_depths_compare_across_texts_however_rounds_grow_with_load(of_sequences: float, of_context: float) -> None:
    """Each batch is decoded at one depth, from 128 tokens on to 256, where a quarter of it has ended."""
    times, rng, apart = RoundTimes(DEEPEST), random.Random(1), 0.5
    for batch in range(60):
        k = (8, 12)[batch % 2]
        for context in range(128, 256, 8):
            sequences = 16 if context < 224 else 12
            grown = of_sequences * math.log(sequences / 16) + of_context * math.log(context / 128)
            seconds = 0.01 * math.exp(apart * (k == 12) + grown + rng.gauss(0, 0.05))
            times.observe(Load(sequences, context), k, seconds)
    assert times.mean[12] - times.mean[8] == pytest.approx(apart, abs=0.05)
    early, late, fewer = (times.at(load)[8] for load in (Load(16, 140), Load(16, 240), Load(12, 240)))
    assert late - early == pytest.approx(of_context * math.log(240 / 140), abs=0.1)
    assert fewer - late == pytest.approx(of_sequences * math.log(12 / 16), abs=0.05)


def test_rounds_of_no_one_depth_change_no_estimate_of_time() -> None:
    controller = DepthController()
    run(PAYS, HEAVY, controller, rounds=100)
    before = [controller.multiplier(HEAVY, k) for k in DEPTHS]
    for _ in range(100):
        controller.observe(HEAVY, None, 10.0, [])
    assert [controller.multiplier(HEAVY, k) for k in DEPTHS] == before


def test_no_more_is_drafted_than_any_sequence_has_room_for() -> None:
    controller = DepthController()
    run(PAYS, HEAVY, controller, rounds=50)
    assert controller.choose(HEAVY, [0] * 16) == 0
    assert all(controller.choose(HEAVY, [2] * 16) <= 2 for _ in range(50))


def test_asking_about_loads_that_never_came_changes_no_estimate() -> None:
    asked, untouched = DepthController(), DepthController()
    assert asked.multiplier(Load(1, 1), 0) == 1
    for controller in (asked, untouched):
        controller.observe(HEAVY, 4, 0.03, [BlockResult(4, 4, 2)] * 16)
        controller.observe(HEAVY, 0, 0.02, [])
    assert [asked.multiplier(HEAVY, k) for k in DEPTHS] == [untouched.multiplier(HEAVY, k) for k in DEPTHS]


def test_the_same_rounds_lead_to_the_same_choices() -> None:
    assert run(PAYS, HEAVY, DepthController(), 300) == run(PAYS, HEAVY, DepthController(), 300)


def test_one_depth_shows_the_acceptance_of_every_smaller_one() -> None:
    acceptance = Acceptance(DEEPEST)
    for _ in range(200):
        acceptance.observe([BlockResult(4, 4, accepted) for accepted in (0, 1, 4, 4)])
    taus = acceptance.taus()
    assert taus[:5] == pytest.approx([1, 1.75, 2.25, 2.75, 3.25], rel=0.01)
    # Beyond what was tried each further token fares like the last one.
    assert taus[5] - taus[4] == pytest.approx(0.5, rel=0.02)
