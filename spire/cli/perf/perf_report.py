"""Figures, map and plots of a scenario for `spire perf-model`. Does not know: tables (`spire.cli.perf.perf_tables`)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from spire.perf import memory_need, perf_model as model, plots
from spire.perf.hardware import Hardware
from spire.perf.memory_need import MemoryNeed
from spire.perf.shapes import DraftShape, Shape
from spire.perf.wire import Wire, wire_bytes

Row = dict[str, Any]


class Candidate(NamedTuple):
    """A draft to evaluate: its name, acceptance, and shape under each window rule, of which the map shows the first."""

    name: str
    acceptance: model.AcceptanceModel
    windows: dict[str, DraftShape]

    @property
    def draft(self) -> DraftShape:
        return next(iter(self.windows.values()))


class Scenario(NamedTuple):
    """Input of a report: target, drafts, device; batch, context and k of the table; batches and contexts of the map.

    `tied`: the target's embedding and unembedding are one matrix. `price` is the price of an hour of all devices.
    """

    target_name: str
    target: Shape
    tied: bool
    candidates: list[Candidate]
    hardware: Hardware
    price: float | None
    batch: int
    context: int
    k: int
    max_k: int
    batches: list[int]
    contexts: list[int]


class Apart(NamedTuple):
    """A device of the draft's own, its price per hour, the network to it, and the number of `lanes`: 1, or 2 groups of
    running sequences of which one is drafted for while the other is verified."""

    hardware: Hardware
    wire: Wire
    lanes: int
    price: float | None


# Cells of the map: one list for each batch, with one cell for each context.
Grid = list[list[Row]]


def report(scenario: Scenario, apart: Apart | None) -> Row:
    """Return the figures of all drafts at the scenario's batch, context and k; with `apart` also on two devices."""
    machine = scenario.hardware
    figures = {
        "target": {"name": scenario.target_name, "body_parameters": scenario.target.body_parameters},
        "hardware": {
            "name": machine.name,
            "flops_per_byte": machine.operational_intensity,
            "bytes_per_value": machine.bytes_per_value,
            "measured": machine.measured is not None,
            "memory_gb": _gb(machine.memory_bytes),
        },
        "formula": "paper" if machine.relative else "every cost",
        "batch": scenario.batch,
        "context": scenario.context,
        "k": scenario.k,
        "critical_context": model.critical_context(scenario.target, scenario.k, machine),
        "critical_batch": model.critical_batch(scenario.target, scenario.context, scenario.k, machine),
        "plain": None if machine.relative else _plain(scenario),
        "drafts": [row for candidate in scenario.candidates for row in _windows(scenario, candidate)],
    }
    if apart:
        figures["deployments"] = [row for each in scenario.candidates for row in _deployments(scenario, each, apart)]
    return figures


def _windows(scenario: Scenario, candidate: Candidate) -> list[Row]:
    """Return a table row for each window rule of a draft; rules that cache equally many positions share a row."""
    rows: dict[int, Row] = {}
    for window, draft in candidate.windows.items():
        rows.setdefault(draft.cached_positions(scenario.context), _together(scenario, candidate, window, draft))
    return list(rows.values())


def _deployments(scenario: Scenario, candidate: Candidate, apart: Apart) -> list[Row]:
    """Return rows for plain decoding, speculation on one device, and speculation on two devices, of equal batch."""
    window, draft = next(iter(candidate.windows.items()))
    return [
        {"draft": candidate.name, "deployment": "plain"} | _plain(scenario),
        {"deployment": "one device"} | _together(scenario, candidate, window, draft),
        {"deployment": f"two, {apart.lanes} lane{'s' * (apart.lanes > 1)}"}
        | _split(scenario, candidate, window, draft, apart),
    ]


def _plain(scenario: Scenario) -> Row:
    cost = model.plain_cost(scenario.target, scenario.batch, scenario.context, scenario.hardware)
    fit = _fit([_target_need(scenario, scenario.context)], scenario.batch, scenario.hardware)
    row = {"tau": 1.0, "delta_t": 1.0, "multiplier": 1.0, "paper_multiplier": 1.0}
    return row | _timed(cost, scenario.batch, scenario.price) | fit


def _together(scenario: Scenario, candidate: Candidate, window: str, draft: DraftShape) -> Row:
    """Return the table row for speculation with target and draft on one device."""
    k, tau, machine = scenario.k, candidate.acceptance.tau(scenario.k), scenario.hardware
    point = (scenario.target, draft, scenario.batch, scenario.context, k, tau, machine)
    fit = _fit(_needs(scenario, draft, scenario.context, k), scenario.batch, machine)
    if machine.relative:
        return _described(scenario, candidate, window, draft, None) | fit
    carried = _carried(scenario, draft, scenario.batch, tau, machine.carrier)
    timed = _timed(model.round_cost(*point), scenario.batch * tau, scenario.price)
    return _described(scenario, candidate, window, draft, model.multiplier(*point)) | carried | timed | fit


def _split(scenario: Scenario, candidate: Candidate, window: str, draft: DraftShape, apart: Apart) -> Row:
    """Return the table row for speculation with the draft on its own device, a case that the paper does not treat."""
    k, tau, batch, context = scenario.k, candidate.acceptance.tau(scenario.k), scenario.batch, scenario.context
    point = (scenario.target, draft, batch, context, k, tau, scenario.hardware)
    cost = model.split_cost(*point, apart.hardware, apart.wire, apart.lanes)
    plain = model.plain_cost(scenario.target, batch, context, scenario.hardware)
    lane = batch / apart.lanes
    row = _described(scenario, candidate, window, draft, lane * tau / cost.seconds * plain.seconds / batch)
    row |= {"paper_multiplier": None} | _carried(scenario, draft, lane, tau, apart.wire.carrier)
    prices = None if scenario.price is None or apart.price is None else scenario.price + apart.price
    row |= _timed(cost, lane * tau, prices)
    ours = _fit([_target_need(scenario, context)], batch, scenario.hardware)
    its = _fit([memory_need.of_draft(draft, context, k, apart.hardware.bytes_per_value)], batch, apart.hardware)
    known, batches = ([fit[name] for fit in (ours, its)] for name in ("fits", "largest_batch"))
    both = {  # must fit
        "fits": False if False in known else None if None in known else True,
        "largest_batch": None if None in batches else min(batches),
        "draft_needs_gb": its["needs_gb"],
        "draft_memory_gb": its["memory_gb"],
    }
    return row | ours | both


def _described(scenario: Scenario, candidate: Candidate, window: str, draft: DraftShape, gain: float | None) -> Row:
    """Return a draft's sizes, τ, Δt and multipliers. `gain`: the multiplier with all costs; None if unknown."""
    k, tau = scenario.k, candidate.acceptance.tau(scenario.k)
    paper = model.paper_multiplier(scenario.target, draft, scenario.batch, scenario.context, k, tau, scenario.hardware)
    known = paper if gain is None else gain
    return {
        "draft": candidate.name,
        "body_parameters": draft.shape.body_parameters,
        "window": window,
        "cached_positions": draft.cached_positions(scenario.context),
        "tau": tau,
        "delta_t": tau / known,
        "multiplier": gain,
        "paper_multiplier": paper,
        "units_saved": model.units_saved(known, model.training_units(draft, scenario.target)),
    }


def _carried(scenario: Scenario, draft: DraftShape, sequences: float, tau: float, carrier: str) -> Row:
    carried = wire_bytes(scenario.target, draft, sequences, scenario.k, tau, scenario.hardware.bytes_per_value)
    return {"carrier": carrier, "wire_bytes_per_round": carried}


def _timed(cost: model.RoundCost, tokens: float, price: float | None) -> Row:
    """Return times, tokens per second and price of a round of `tokens` tokens. `price`: of all devices for an hour."""
    parts = {"draft": cost.draft, "wire": cost.wire, "verify": cost.verify, "round": cost.seconds}
    row: Row = {f"{part}_ms": seconds * 1000 for part, seconds in parts.items()}
    row["tokens_per_second"] = tokens / cost.seconds
    if price is not None:
        row["price_per_million_tokens"] = model.price_per_million_tokens(row["tokens_per_second"], price)
    return row


def _target_need(scenario: Scenario, context: int) -> MemoryNeed:
    return memory_need.of_target(scenario.target, context, scenario.hardware.bytes_per_value, scenario.tied)


def _needs(scenario: Scenario, draft: DraftShape, context: int, k: int) -> list[MemoryNeed]:
    """Return the memory needs of target and draft on one device, in the order in which the models are loaded."""
    return [_target_need(scenario, context), memory_need.of_draft(draft, context, k, scenario.hardware.bytes_per_value)]


def _fit(needs: list[MemoryNeed], batch: int, hardware: Hardware) -> Row:
    memory = hardware.memory_bytes
    largest = None if memory is None else memory_need.largest_batch(needs, memory)
    return {
        "fits": None if largest is None else batch <= largest,
        "needs_gb": _gb(sum(need.bytes(batch) for need in needs)),
        "weights_gb": _gb(sum(need.weights for need in needs)),
        "memory_gb": _gb(memory),
        "largest_batch": largest,
    }


def _gb(size: float | None) -> float | None:
    return None if size is None else size / 1e9


def grid(scenario: Scenario, candidate: Candidate) -> Grid:
    """Return the map of a draft: the best speculation depth by batch (rows) and context (columns).

    `fits` of a cell is True if the batch fits into the device's memory; None if the size of the memory is unknown.
    """
    return [[_cell(scenario, candidate, batch, context) for context in scenario.contexts] for batch in scenario.batches]


def _cell(scenario: Scenario, candidate: Candidate, batch: int, context: int) -> Row:
    draft, machine = candidate.draft, scenario.hardware
    best = model.best_k(scenario.target, draft, batch, context, candidate.acceptance, machine, scenario.max_k)
    fit = _fit(_needs(scenario, draft, context, best.k), batch, machine)
    where = {"draft": candidate.name, "batch": batch, "context": context}
    return where | {"k": best.k, **asdict(best), "fits": fit["fits"]}


def plot(directory: Path, scenario: Scenario, maps: dict[str, Grid]) -> list[Path]:
    """Write speedup.png, map.png and intensity.png and return their paths. Raises SpireError without matplotlib."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"{name}.png" for name in ("speedup", "map", "intensity")]
    grid, title = (scenario.batches, scenario.contexts), f"{scenario.target_name} on {scenario.hardware.name}"
    plots.write_speedup(files[0], f"{title}: modelled speed-up at k = {scenario.k}", _speedups(scenario), *grid)
    panels = {_panel(each, next(iter(each.windows))): maps[each.name] for each in scenario.candidates}
    plots.write_map(files[1], f"{title}: where to speculate, and how deep", panels, *grid)
    plots.write_intensity(
        files[2], f"{title}: verification", scenario.target, scenario.contexts, scenario.k, scenario.hardware
    )
    return files


def _speedups(scenario: Scenario) -> dict[str, list[list[float | None]]]:
    """Return speed-ups by panel: one per draft and window rule, the first rules of all drafts before second rules."""
    shown = [(each, list(each.windows.items())) for each in scenario.candidates]
    panels = [(each, *windows[rule]) for rule in range(2) for each, windows in shown if len(windows) > rule]
    return {
        _panel(each, window): [
            [_speedup(scenario, each, draft, batch, context) for context in scenario.contexts]
            for batch in scenario.batches
        ]
        for each, window, draft in panels
    }


def _speedup(scenario: Scenario, candidate: Candidate, draft: DraftShape, batch: int, context: int) -> float | None:
    k, machine = scenario.k, scenario.hardware
    if _fit(_needs(scenario, draft, context, k), batch, machine)["fits"] is False:
        return None
    gain = model.paper_multiplier if machine.relative else model.multiplier
    return gain(scenario.target, draft, batch, context, k, candidate.acceptance.tau(k), machine)


def _panel(candidate: Candidate, window: str) -> str:
    return candidate.name if candidate.draft.kind == "vanilla" else f"{candidate.name}, W = {window}"
