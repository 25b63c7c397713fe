"""What `spire perf-model` reports of a scenario: rows of figures, the map, and how both look in a terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spire import perf_model as model
from spire import plots
from spire.errors import SpireError
from spire.hardware import Cost, Hardware

Row = dict[str, Any]
Choices = list[list[model.Choice]]


@dataclass(frozen=True)
class Candidate:
    """A draft by name, how often it is accepted, and the window rules to show: the map is that of the first."""

    name: str
    acceptance: model.Acceptance
    windows: dict[str, model.Draft]

    @property
    def draft(self) -> model.Draft:
        return next(iter(self.windows.values()))


@dataclass(frozen=True)
class Scenario:
    """A target with its drafts on a device, a point for the table, and a grid for the map."""

    target_name: str
    target: model.Shape
    candidates: list[Candidate]
    hardware: Hardware
    batch: int
    context: int
    k: int
    max_k: int
    batches: list[int]
    contexts: list[int]


@dataclass(frozen=True)
class Apart:
    """The draft's own device: what it is, the stream to it, and the prices of an hour of the target's and of its."""

    hardware: Hardware
    stream: Cost
    lanes: int
    prices: tuple[float, float] | None


# --- figures ----------------------------------------------------------------------------------------------------------


def report(scenario: Scenario) -> Row:
    """Everything about the point, without the map."""
    machine = scenario.hardware
    return {
        "target": {"name": scenario.target_name, "body_parameters": scenario.target.body_parameters},
        "hardware": {
            "name": machine.name,
            "flops_per_byte": machine.operational_intensity,
            "bytes_per_value": machine.bytes_per_value,
            "measured": machine.measured is not None,
        },
        "batch": scenario.batch,
        "context": scenario.context,
        "k": scenario.k,
        "critical_context": model.critical_context(scenario.target, scenario.k, machine),
        "critical_batch": model.critical_batch(scenario.target, scenario.context, scenario.k, machine),
        "drafts": [row for candidate in scenario.candidates for row in _rows(scenario, candidate)],
    }


def _rows(scenario: Scenario, candidate: Candidate) -> list[Row]:
    """One row for each window rule, where they differ."""
    rows: dict[int, Row] = {}
    for window, draft in candidate.windows.items():
        rows.setdefault(draft.cached_positions(scenario.context), _row(scenario, candidate, window, draft))
    return list(rows.values())


def _row(scenario: Scenario, candidate: Candidate, window: str, draft: model.Draft) -> Row:
    tau = candidate.acceptance.tau(scenario.k)
    gain = model.multiplier(
        scenario.target, draft, scenario.batch, scenario.context, scenario.k, tau, scenario.hardware
    )
    return {
        "draft": candidate.name,
        "body_parameters": draft.shape.body_parameters,
        "window": window,
        "cached_positions": draft.cached_positions(scenario.context),
        "tau": tau,
        "delta_t": tau / gain,
        "multiplier": gain,
        "units_saved": model.units_saved(gain, model.training_units(draft, scenario.target)),
    }


def deployments(scenario: Scenario, apart: Apart) -> list[Row]:
    """For each draft: plain decoding, speculation on one device, the draft apart, all of the same sequences."""
    if scenario.hardware.relative != apart.hardware.relative:
        raise SpireError("--draft-hardware needs --hardware: seconds cannot be compared with ratios")
    if scenario.hardware.relative and apart.prices:
        raise SpireError("--price needs seconds: name a device with --hardware")
    return [row for candidate in scenario.candidates for row in _deployments(scenario, candidate, apart)]


def _deployments(scenario: Scenario, candidate: Candidate, apart: Apart) -> list[Row]:
    k, tau, machine, batch = scenario.k, candidate.acceptance.tau(scenario.k), scenario.hardware, scenario.batch
    where = (scenario.target, candidate.draft, batch, scenario.context)
    plain = model.round_cost(*where, 0, 1, machine, apart.stream)
    together = model.round_cost(*where, k, tau, machine, apart.stream)
    split = model.split_cost(*where, k, tau, machine, apart.hardware, apart.stream, apart.lanes)
    lane = batch / apart.lanes
    name = f"two, {apart.lanes} lane{'s' * (apart.lanes > 1)}"
    compared: list[tuple[str, model.Round | model.Split, int, float, int]] = [
        ("plain", plain, 0, batch, 1),
        ("one device", together, k, batch, 1),
        (name, split, k, lane, 2),
    ]
    rows = []
    for name, cost, depth, sequences, devices in compared:
        gained = tau if depth else 1.0
        tokens = sequences * gained
        row: Row = {"draft": candidate.name, "deployment": name}
        row["multiplier"] = tokens / cost.seconds * plain.seconds / batch
        row["wire_bytes_per_round"] = model.wire_bytes(*where[:2], sequences, depth, gained, machine.bytes_per_value)
        if not machine.relative:
            parts = {"draft": cost.draft, "wire": cost.wire, "verify": cost.verify, "round": cost.seconds}
            row |= {f"{part}_ms": seconds * 1000 for part, seconds in parts.items()}
            row["tokens_per_second"] = tokens / cost.seconds
        if apart.prices:
            rate, price = tokens / cost.seconds, sum(apart.prices[:devices])
            row["price_per_million_tokens"] = model.price_per_million_tokens(rate, price)
        rows.append(row)
    return rows


def choices(scenario: Scenario, candidate: Candidate) -> Choices:
    """The map: best depths by batch and context."""
    fixed = (candidate.acceptance, scenario.hardware, scenario.max_k)
    return [
        [model.best_k(scenario.target, candidate.draft, batch, context, *fixed) for context in scenario.contexts]
        for batch in scenario.batches
    ]


def cells(scenario: Scenario, maps: dict[str, Choices]) -> list[Row]:
    """The maps as flat rows."""
    return [
        {"draft": name, "batch": batch, "context": context, "k": choice.k, **asdict(choice)}
        for name, grid in maps.items()
        for batch, row in zip(scenario.batches, grid, strict=True)
        for context, choice in zip(scenario.contexts, row, strict=True)
    ]


def plot(directory: Path, scenario: Scenario, maps: dict[str, Choices]) -> list[Path]:
    """Write the three figures. Raises SpireError without matplotlib."""
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


def _speedups(scenario: Scenario) -> dict[str, list[list[float]]]:
    """By panel: first each draft under its first window rule, then under its second."""
    shown = [(each, list(each.windows.items())) for each in scenario.candidates]
    panels = [(each, *windows[rule]) for rule in range(2) for each, windows in shown if len(windows) > rule]
    return {_panel(each, window): _speedup(scenario, each, draft) for each, window, draft in panels}


def _speedup(scenario: Scenario, candidate: Candidate, draft: model.Draft) -> list[list[float]]:
    fixed = (scenario.k, candidate.acceptance.tau(scenario.k), scenario.hardware)
    return [
        [model.multiplier(scenario.target, draft, batch, context, *fixed) for context in scenario.contexts]
        for batch in scenario.batches
    ]


def _panel(candidate: Candidate, window: str) -> str:
    return candidate.name if candidate.draft.kind == "vanilla" else f"{candidate.name}, W = {window}"


# --- tables -----------------------------------------------------------------------------------------------------------


def show(scenario: Scenario, figures: Row, maps: dict[str, Choices]) -> None:
    console = Console(highlight=False)
    machine = figures["hardware"]
    console.print(f"{scenario.target_name}: {scenario.target.body_parameters:,} parameters in layers")
    width = f"{machine['bytes_per_value']:g} bytes a value"
    console.print(f"{machine['name']}: {machine['flops_per_byte']:,.0f} FLOPs per byte, {width}")
    console.print(_boundary(figures))
    title = f"batch {scenario.batch}, context {scenario.context:,}, k = {scenario.k}"
    console.print(f"\n[bold]{title}[/]", _points_table(figures), sep="\n")
    for candidate in scenario.candidates:
        rows = [row for row in figures.get("deployments", []) if row["draft"] == candidate.name]
        if rows:
            title = f"{candidate.name}: the same sequences in flight on one device and on two; times in ms"
            console.print(f"[bold]{title}[/]", _deployments_table(rows), sep="\n")
    for name, grid in maps.items():
        title = f"{name}: best k and its multiplier, by batch (down) and context (right)"
        console.print(f"[bold]{title}[/]", _map_table(scenario, grid), "", sep="\n")
    for file in figures.get("plots", []):
        console.print(f"wrote {file}", soft_wrap=True)


def _boundary(figures: Row) -> str:
    at = figures["critical_batch"]
    here = "at no batch" if at is None else f"from batch {at:,.0f}"
    return f"verification at this context is compute-bound {here}; critical context {figures['critical_context']:,}"


def _points_table(figures: Row) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("draft")
    for heading in ("parameters", "window", "τ", "Δt", "multiplier", "saved of 10"):
        table.add_column(heading, justify="right")
    for row in figures["drafts"]:
        table.add_row(
            row["draft"],
            _count(row["body_parameters"]),
            row["window"],
            f"{row['tau']:.3f}",
            f"{row['delta_t']:.3f}",
            Text(f"{row['multiplier']:.3f}", style=_style(row["multiplier"])),
            f"{row['units_saved']:.2f}",
        )
    return table


_DEPLOYMENT_COLUMNS = {
    "draft_ms": ("draft", ".2f"),
    "wire_ms": ("wire", ".2f"),
    "verify_ms": ("verify", ".2f"),
    "round_ms": ("round", ".2f"),
    "tokens_per_second": ("tok/s", ",.0f"),
    "multiplier": ("× plain", ".2f"),
    "price_per_million_tokens": ("per 10⁶", ".3f"),
}


def _deployments_table(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    shown = {key: look for key, look in _DEPLOYMENT_COLUMNS.items() if key in rows[0]}
    for heading, _ in shown.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["deployment"], *(format(row[key], look) for key, (_, look) in shown.items()))
    return table


def _map_table(scenario: Scenario, grid: Choices) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    for context in scenario.contexts:
        table.add_column(plots.short(context), justify="right", no_wrap=True)
    for batch, row in zip(scenario.batches, grid, strict=True):
        cells_of_row = [Text(_cell(choice), style=_style(choice.multiplier)) for choice in row]
        table.add_row(plots.short(batch), *cells_of_row)
    return table


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} · 10⁹" if parameters >= 1e9 else f"{parameters:,}"


def _cell(choice: model.Choice) -> str:
    return f"off {choice.multiplier:.2f}".replace(" 0.", " .") if choice.off else f"{choice.k} {choice.multiplier:.2f}"


def _style(gain: float) -> str:
    for least, style in ((2.0, "bold green"), (1.25, "green"), (1.0, "yellow")):
        if gain > least:
            return style
    return "red"
