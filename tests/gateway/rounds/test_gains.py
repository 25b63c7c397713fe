"""The gains that the gateway tells: only what rounds have shown, and those of the system behind the rounds."""

from __future__ import annotations

from gateway.rounds.acceptance import BlockResult
from gateway.rounds.depth import DepthController
from gateway.rounds.round_times import Load
from tests.gateway.rounds.test_depth import HEAVY, LOSES, PAYS, System, run


def controller_of(system: System, load: Load = HEAVY, rounds: int = 400) -> DepthController:
    controller = DepthController()
    run(system, load, controller, rounds)
    return controller


def test_no_gain_is_told_before_rounds_have_shown_one() -> None:
    assert DepthController().gains() == []
    assert controller_of(PAYS, rounds=4).gains() == []


def test_a_gain_is_told_as_the_system_has_it() -> None:
    (gain,) = controller_of(PAYS).gains()
    assert (gain.sequences, gain.context) == (HEAVY.sequences, HEAVY.context)
    load = Load(gain.sequences, gain.context)
    assert abs(gain.multiplier / (PAYS.rate(gain.k, load) / PAYS.rate(0, load)) - 1) < 0.15


def test_a_loss_is_told_as_a_gain_below_one() -> None:
    assert all(gain.multiplier < 1 for gain in controller_of(LOSES).gains())


def test_gains_are_told_by_load() -> None:
    controller = DepthController()
    for sequences in (16, 1):
        run(PAYS, Load(sequences, 512), controller, 400)
    assert [gain.sequences for gain in controller.gains()] == [1, 16]


def test_rounds_beside_a_prefill_tell_no_gain() -> None:
    controller = DepthController()
    load = Load(4, 512, prefilling=True)
    for _ in range(100):
        k = controller.choose(load, [64] * 4)
        controller.observe(load, k, PAYS.seconds(k, load), [BlockResult(k, k, k)] * 4 if k else [])
    assert controller.gains() == []
