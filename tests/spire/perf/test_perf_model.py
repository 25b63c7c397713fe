"""The performance model against the paper's printed values, and its extensions against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spire.errors import InvalidRequest
from spire.model.config import load_draft_config, load_model_config
from spire.perf.hardware import Cost, Curve, Hardware, Measured, ModelCosts, gpu
from spire.perf.memory_need import of_draft
from spire.perf.perf_model import (
    PAPER_TAU,
    AcceptanceModel,
    best_k,
    critical_batch,
    critical_context,
    draft_seconds,
    multiplier,
    operational_intensity,
    paper_multiplier,
    plain_cost,
    price_per_million_tokens,
    round_cost,
    split_cost,
    training_units,
    units_saved,
    verify_seconds,
)
from spire.perf.shapes import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    SEQAX_67M,
    DraftKind,
    DraftShape,
    Shape,
    paper_draft,
    trained_draft,
)
from spire.perf.wire import Wire, wire_bytes, wire_of
from tests.paths import ROOT

KINDS: tuple[DraftKind, ...] = ("vanilla", "magicdec", "spire")
PAPER = Hardware.of_intensity(600)
BATCHES = [2**exponent for exponent in range(8)]
FIGURE_4 = [2**exponent for exponent in range(5, 14)]
FIGURE_6 = [2**exponent for exponent in range(12, 21)]
BUNDLED = ROOT / "models"


def paper(target: Shape, kind: DraftKind, batch: int, context: int, window: int | None = None) -> float:
    """The multiplier of the paper's figures: k = 4, its τ, and W = L/8 unless a fixed window is given."""
    return paper_multiplier(target, paper_draft(kind, target, window), batch, context, 4, PAPER_TAU[kind], PAPER)


def bundled() -> tuple[Shape, DraftShape]:
    config = load_draft_config(BUNDLED / "draft")
    shapes = (Shape.of(load_model_config(BUNDLED / name)) for name in ("target", "draft"))
    target, draft = shapes
    return target, DraftShape("spire", draft, config.window, config.sink)


# --- the paper --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "parameters"), [("vanilla", 8390656), ("magicdec", 67117056), ("spire", 16779264)])
def test_body_parameters_are_the_paper_s(kind: DraftKind, parameters: int) -> None:
    assert paper_draft(kind, SEQAX_67M).shape.body_parameters == parameters


@pytest.mark.parametrize(("kind", "printed"), [("vanilla", 1.361), ("magicdec", 2.052), ("spire", 2.779)])
def test_multipliers_at_batch_64_and_context_512_are_the_paper_s(kind: DraftKind, printed: float) -> None:
    assert round(paper(SEQAX_67M, kind, 64, 512), 3) == printed
    assert paper(SEQAX_67M, kind, 64, 512, window=64) == paper(SEQAX_67M, kind, 64, 512), "L/8 is 64 there"


@pytest.mark.parametrize(("kind", "printed"), [("magicdec", 2.14), ("spire", 2.82)])
def test_multipliers_of_llama_3_70b_are_the_paper_s(kind: DraftKind, printed: float) -> None:
    assert round(paper(LLAMA_3_70B, kind, 64, 65536), 2) == printed


@pytest.mark.parametrize(("target", "printed"), [(SEQAX_67M, 32), (LLAMA_3_70B, 4096)])
def test_critical_contexts_are_the_paper_s(target: Shape, printed: int) -> None:
    assert critical_context(target, 4, PAPER) == printed
    anything = 1e12
    assert (
        operational_intensity(target, anything, printed, 4)
        > 600
        > operational_intensity(target, anything, 2 * printed, 4)
    )


def test_verification_turns_compute_bound_at_the_critical_batch() -> None:
    at = critical_batch(SEQAX_67M, 32, 4, PAPER)
    assert at is not None
    assert operational_intensity(SEQAX_67M, at, 32, 4) == pytest.approx(600)
    assert critical_batch(SEQAX_67M, 64, 4, PAPER) is None


def test_decoding_units_saved_are_the_paper_s() -> None:
    """The paper rounds its multipliers to two decimals first."""
    training = {kind: training_units(paper_draft(kind, SEQAX_67M), SEQAX_67M) for kind in KINDS}
    assert training["spire"] == 0.25
    assert training["magicdec"] == 0
    assert round(units_saved(round(paper(SEQAX_67M, "spire", 64, 512), 2), 0.25), 2) == 6.15
    assert round(units_saved(round(paper(SEQAX_67M, "magicdec", 64, 512), 2), 0), 2) == 5.12
    assert round(units_saved(round(paper(LLAMA_3_70B, "spire", 64, 65536), 2), 0.25), 2) == 6.20
    assert round(units_saved(round(paper(LLAMA_3_70B, "magicdec", 64, 65536), 2), 0), 2) == 5.33


def test_the_paper_s_claims_of_its_abstract_hold() -> None:
    vanilla, magicdec, spire = (paper(SEQAX_67M, kind, 64, 512) for kind in KINDS)
    assert spire / vanilla > 2.0
    assert spire / magicdec > 1.35


@pytest.mark.parametrize(("target", "contexts"), [(SEQAX_67M, FIGURE_4), (LLAMA_3_70B, FIGURE_6)])
def test_spire_gains_most_in_most_cells_of_figures_4_and_6(target: Shape, contexts: list[int]) -> None:
    cells = [(batch, context) for batch in BATCHES for context in contexts]
    won = [max(KINDS, key=lambda kind, cell=cell: paper(target, kind, *cell)) for cell in cells]
    assert won.count("spire") > len(cells) / 2
    assert "magicdec" not in won, "with W = L/8 it reads an eighth of the cache k times"


@pytest.mark.parametrize("context", FIGURE_4)
def test_a_larger_batch_never_helps_vanilla_speculation(context: int) -> None:
    gains = [paper(SEQAX_67M, "vanilla", batch, context) for batch in BATCHES]
    assert gains == sorted(gains, reverse=True)


def test_magicdec_may_lose_against_plain_decoding() -> None:
    assert paper(SEQAX_67M, "magicdec", 1, 32) < 1


@pytest.mark.parametrize("context", FIGURE_4[4:])
def test_spire_with_a_dense_cache_gains_the_same_at_any_context(context: int) -> None:
    """Figure 5: a quarter of the target read k = 4 times is one target more, so the multiplier is τ / 2."""
    dense = replace(paper_draft("spire", SEQAX_67M), window=context)
    assert paper_multiplier(SEQAX_67M, dense, 64, context, 4, 3.401, PAPER) == pytest.approx(3.401 / 2)


def test_a_fixed_window_reverses_the_order_of_magicdec_and_spire() -> None:
    assert paper(SEQAX_67M, "magicdec", 128, 8192) < paper(SEQAX_67M, "spire", 128, 8192)
    assert paper(SEQAX_67M, "magicdec", 128, 8192, window=64) > paper(SEQAX_67M, "spire", 128, 8192, window=64)


def test_without_memory_pressure_the_hardware_decides() -> None:
    """At batch 128 and context 32 verification of 5 tokens is compute-bound at HOI 600 and free at HOI 6,000."""
    draft = paper_draft("spire", SEQAX_67M, None)
    machines = [Hardware.of_intensity(hoi) for hoi in (600, 6000, 60000)]
    gains = [paper_multiplier(SEQAX_67M, draft, 128, 32, 4, 3.401, machine) for machine in machines]
    assert gains[0] < gains[1] == pytest.approx(gains[2])


# --- acceptance and depth ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 2.647, 3.401, 5.0])
def test_geometric_acceptance_has_the_tau_it_was_made_from(tau: float) -> None:
    acceptance = AcceptanceModel.of_tau(tau, 4)
    assert acceptance.tau(4) == pytest.approx(tau)
    rate = acceptance.prefix[0]
    assert acceptance.prefix == pytest.approx([rate, rate**2, rate**3, rate**4])
    assert acceptance.tau(6) == pytest.approx(sum(rate**i for i in range(7)))


def test_measured_shares_give_tau_at_every_depth() -> None:
    acceptance = AcceptanceModel((0.8, 0.6, 0.3))
    assert [acceptance.tau(k) for k in range(4)] == pytest.approx([1, 1.8, 2.4, 2.7])
    assert acceptance.tau(5) == pytest.approx(2.7 + 0.15 + 0.075), "the last token was accepted half of the time"


@pytest.mark.parametrize("wrong", [(), (1.2,), (0.5, 0.6), (0.5, -0.1)])
def test_shares_that_cannot_be_are_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequest, match="prefix acceptance"):
        AcceptanceModel(wrong)


@pytest.mark.parametrize(("tau", "k"), [(0.9, 4), (5.1, 4), (1.0, 0)])
def test_a_tau_that_cannot_be_is_refused(tau: float, k: int) -> None:
    with pytest.raises(InvalidRequest, match=f"τ is {tau} at k = {k}"):
        AcceptanceModel.of_tau(tau, k)


@pytest.mark.parametrize(("batch", "context"), [(1, 32), (8, 512), (64, 512), (128, 8192)])
def test_best_k_is_the_best_of_all_depths(batch: int, context: int) -> None:
    draft, acceptance = paper_draft("magicdec", SEQAX_67M), AcceptanceModel.of_tau(3.891, 4)
    gains = {k: paper_multiplier(SEQAX_67M, draft, batch, context, k, acceptance.tau(k), PAPER) for k in range(9)}
    choice = best_k(SEQAX_67M, draft, batch, context, acceptance, PAPER)
    assert gains[choice.k] == max(gains.values())
    assert (choice.k == 0) == (max(gains.values()) == gains[0] == 1)


def test_speculation_is_off_where_it_loses() -> None:
    acceptance = AcceptanceModel.of_tau(3.891, 4)
    magicdec = paper_draft("magicdec", SEQAX_67M)
    assert best_k(SEQAX_67M, magicdec, 1, 32, acceptance, PAPER).k == 0
    assert best_k(SEQAX_67M, magicdec, 128, 8192, acceptance, PAPER).k > 0
    hopeless = best_k(SEQAX_67M, paper_draft("spire", SEQAX_67M), 64, 512, AcceptanceModel((0.0,)), PAPER)
    assert hopeless.k == 0


@pytest.mark.parametrize(("batch", "context", "k"), [(0, 512, 4), (64, 0, 4), (64, 512, -1)])
def test_an_empty_round_is_refused(batch: int, context: int, k: int) -> None:
    for function in (multiplier, paper_multiplier):
        with pytest.raises(InvalidRequest, match=f"batch {batch}, context {context}, k {k}"):
            function(SEQAX_67M, paper_draft("spire", SEQAX_67M), batch, context, k, 2.0, gpu("h100"))


def test_hardware_without_seconds_has_the_paper_s_formula_alone() -> None:
    with pytest.raises(InvalidRequest, match="HOI 600 has no seconds"):
        multiplier(SEQAX_67M, paper_draft("spire", SEQAX_67M), 64, 512, 4, 3.401, PAPER)


# --- hardware ---------------------------------------------------------------------------------------------------------


def test_an_h100_in_fp8_is_the_paper_s_hardware_within_two_percent() -> None:
    assert gpu("h100", 1).operational_intensity == pytest.approx(600, rel=0.02)
    assert gpu("h200", 1).operational_intensity < gpu("h100", 1).operational_intensity


@pytest.mark.parametrize(("name", "width", "said"), [("abacus", 2, "choose one of a100"), ("h100", 4, "4 bytes")])
def test_unknown_hardware_is_refused_by_name(name: str, width: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        gpu(name, width)


def test_more_devices_shorten_every_forward_alike_and_hold_more() -> None:
    draft = paper_draft("spire", LLAMA_3_70B)
    one, eight = (round_cost(LLAMA_3_70B, draft, 64, 65536, 4, 3.4, gpu("h100").times(n)) for n in (1, 8))
    assert one.draft + one.verify == pytest.approx(8 * (eight.draft + eight.verify))
    assert gpu("h100").times(8).memory_bytes == 8 * 80e9


def test_a_data_sheet_s_device_reads_the_unembedding_too() -> None:
    """All of 8B's matrices but the embedding, and its cache, once a step: they take 14.7 ms on an H100."""
    step = plain_cost(LLAMA_3_8B, 32, 8192, gpu("h100"))
    matrices = LLAMA_3_8B.body_parameters + LLAMA_3_8B.vocab_size * LLAMA_3_8B.hidden_size
    cached = 32 * 8192 * LLAMA_3_8B.kv_values_per_position
    assert step.verify == pytest.approx(2 * (matrices + cached) / 3.35e12)
    assert round(step.verify * 1000, 1) == 14.7


def test_by_the_papers_formula_an_8b_model_on_an_h100_gains_most_at_k_7() -> None:
    draft, acceptance = trained_draft("spire", LLAMA_3_8B), AcceptanceModel.of_tau(3.4, 4)
    gains = [paper_multiplier(LLAMA_3_8B, draft, 32, 8192, k, acceptance.tau(k), gpu("h100")) for k in (4, 7)]
    assert [round(gain, 2) for gain in gains] == [2.63, 2.79]


FLAT = ModelCosts(matmul=((1, 100e9),), layer=Cost(), sampling=Cost())


def machine(target: ModelCosts = FLAT, draft: ModelCosts = FLAT, wire: Cost = Cost()) -> Hardware:
    """A calibrated device of 100 GFLOP/s and 10 GB/s with bfloat16."""
    measured = Measured(target, draft, kv_read=Curve(((1, 1 / 10e9),)), draft_round=Cost(), wire=wire)
    return Hardware("bench", 100e9, 10e9, 2, measured=measured)


def test_a_machine_without_overheads_costs_what_the_paper_s_formula_says() -> None:
    """Where reading dominates each operation; the shape has no vocabulary, so nothing is unembedded."""
    for kind in ("vanilla", "magicdec"):
        point = (SEQAX_67M, paper_draft(kind, SEQAX_67M), 1, 512, 4, 3, machine())
        assert multiplier(*point) == pytest.approx(paper_multiplier(*point))


def by_layer() -> Hardware:
    """A device on which passes of a vanilla draft run layer by layer, each layer in a millisecond."""
    usual = machine()
    assert usual.measured is not None
    return replace(usual, measured=replace(usual.measured, pass_layer=Cost(1e-3)))


def test_a_vanilla_draft_pays_for_running_layer_by_layer() -> None:
    draft = paper_draft("vanilla", SEQAX_67M)
    before, after = (round_cost(SEQAX_67M, draft, 1, 512, 4, 3, hardware) for hardware in (machine(), by_layer()))
    assert after.verify == before.verify
    assert after.draft == pytest.approx(before.draft + 4 * draft.shape.layers * 1e-3)


@pytest.mark.parametrize("hardware", [machine(), by_layer(), gpu("h100")], ids=["kernels", "by layer", "data sheet"])
@pytest.mark.parametrize(("context", "seen"), [(40, 40), (512, 65), (8192, 65)])
def test_a_pass_of_magicdec_costs_a_plain_step_over_sink_and_window(
    hardware: Hardware, context: int, seen: int
) -> None:
    draft = paper_draft("magicdec", SEQAX_67M)
    plain = verify_seconds(SEQAX_67M, 3, seen, 0, hardware)
    assert draft_seconds(draft, 3, context, 4, hardware) == pytest.approx(4 * plain)


def test_magicdec_needs_memory_for_sink_and_window_and_no_weights() -> None:
    short, long = (of_draft(paper_draft("magicdec", SEQAX_67M), context, 4, 2) for context in (512, 65536))
    assert short == long == (0, 128 * SEQAX_67M.kv_values_per_position * 2)


def test_a_measured_forward_adds_up_its_parts() -> None:
    shape = Shape(2, 64, 128, heads=2, kv_heads=1, head_dim=32, vocab_size=1000)
    costs = ModelCosts(matmul=((1, 1e9), (100, 1e9)), layer=Cost(1e-3, 1e-5), sampling=Cost(2e-3, 1e-8))
    rows, k = 3 * 5, 4
    products = 2 * shape.body_parameters * rows / 1e9
    logits = 2 * 64 * 1000 * rows / 1e9
    attention = 3 * 200 * shape.kv_values_per_position * 2 / 10e9
    rest = 2 * (1e-3 + rows * 1e-5) + 2e-3 + rows * 1000 * 1e-8
    assert verify_seconds(shape, 3, 200, k, machine(costs)) == pytest.approx(products + logits + attention + rest)


def test_speed_between_measured_rows_is_interpolated() -> None:
    costs = replace(FLAT, matmul=((1, 1e9), (4, 4e9), (16, 5e9)))
    assert costs.flops_per_second(2) == pytest.approx(2e9)
    assert [costs.flops_per_second(rows) for rows in (0.5, 1, 4, 16, 999)] == [1e9, 1e9, 4e9, 5e9, 5e9]


def test_a_draft_that_launches_slowly_is_switched_off() -> None:
    target, draft = bundled()
    acceptance = AcceptanceModel((0.83, 0.69, 0.58, 0.48))
    slow = replace(FLAT, layer=Cost(fixed=0.1))
    assert best_k(target, draft, 16, 1900, acceptance, machine()).k > 0
    assert best_k(target, draft, 16, 1900, acceptance, machine(draft=slow)).k == 0


def test_a_spire_draft_s_measured_cost_does_not_grow_with_context() -> None:
    _, draft = bundled()
    assert draft_seconds(draft, 16, 100, 4, machine()) == draft_seconds(draft, 16, 100000, 4, machine())


# --- the wire, and the draft apart ------------------------------------------------------------------------------------


def test_wire_bytes_of_the_bundled_pair_are_those_of_the_protocol() -> None:
    target, draft = bundled()
    drafted, committed = 4 * (4 + 4096 * 2), 3.5 * (4 + 2 * 256 * 2)
    assert wire_bytes(target, draft, 16, 4, 3.5, 2) == pytest.approx(16 * (drafted + committed))


def test_a_message_takes_what_was_measured_with_the_machine() -> None:
    slow = machine(wire=Cost(0.5, 1e-6))
    assert wire_of("grpc", slow) == Wire("grpc", 0.5, 1e-6, 1e-6)
    assert wire_of("shared_memory", slow).round_trip == 0.5


FREE = Wire("grpc", 0.0, 0.0, 0.0)


def split(wire: Wire, lanes: int, batch: int = 64) -> Any:
    draft = paper_draft("spire", LLAMA_3_70B)
    return split_cost(LLAMA_3_70B, draft, batch, 65536, 4, 3.401, gpu("h100"), gpu("h200"), wire, lanes)


def test_two_lanes_cost_the_slower_side_and_one_lane_both() -> None:
    two, one = split(FREE, 2), split(FREE, 1)
    assert two.seconds == max(two.draft, two.verify) == two.verify
    assert one.seconds == one.draft + one.verify
    slow = split(replace(FREE, round_trip=10.0), 2)
    assert slow.seconds == slow.draft + slow.wire > slow.verify


def test_two_lanes_read_the_weights_twice() -> None:
    lane, alone = split(FREE, 2, batch=64), split(FREE, 1, batch=32)
    assert (lane.draft, lane.verify) == (alone.draft, alone.verify)
    assert 2 * lane.verify > split(FREE, 1, batch=64).verify


def test_magicdec_has_no_device_of_its_own() -> None:
    draft = paper_draft("magicdec", SEQAX_67M)
    with pytest.raises(InvalidRequest, match="MagicDec drafts with the target's own weights"):
        split_cost(SEQAX_67M, draft, 64, 512, 4, 3.9, gpu("h100"), gpu("h100"), FREE)


def test_a_million_tokens_cost_the_hours_they_take() -> None:
    assert price_per_million_tokens(tokens_per_second=1e6 / 3600, price_per_hour=2.5) == pytest.approx(2.5)
