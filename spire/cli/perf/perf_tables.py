"""Terminal tables of a report of `spire perf-model`."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spire.cli.perf.perf_report import Grid, Row, Scenario
from spire.perf.memory_need import SHARE_OF_FREE_MEMORY
from spire.perf.plots import short

_NOT_FITTING = "–"


def show(scenario: Scenario, figures: Row, maps: dict[str, Grid]) -> None:
    console = Console(highlight=False)
    console.print(*_fits(scenario, figures), sep="\n", soft_wrap=True)
    machine = figures["hardware"]
    console.print(f"{scenario.target_name}: {scenario.target.body_parameters:,} parameters in layers")
    width = f"{machine['bytes_per_value']:g} byte{'s' * (machine['bytes_per_value'] != 1)} a value"
    console.print(f"{machine['name']}: {machine['flops_per_byte']:,.0f} FLOPs per byte, {width}")
    at = figures["critical_batch"]
    here = "at no batch" if at is None else f"from batch {at:,.0f}"
    critical = f"critical context {figures['critical_context']:,}"
    console.print(f"verification at this context is compute-bound {here}; {critical}", soft_wrap=True)
    title = f"batch {scenario.batch}, context {scenario.context:,}, k = {scenario.k}"
    table = _relative_table(figures) if scenario.hardware.relative else _points_table(figures)
    told = "by the paper's formula alone" if scenario.hardware.relative else "on one device; times in ms"
    console.print(f"\n[bold]{title}[/]: {told}", table, "", sep="\n")
    for candidate in scenario.candidates:
        rows = [row for row in figures.get("deployments", []) if row["draft"] == candidate.name]
        if rows:
            title = f"{candidate.name}: the same sequences in flight on one device and on two; times in ms"
            console.print(f"[bold]{title}[/]", _costs_table([(row["deployment"], row) for row in rows]), sep="\n")
            console.print(f"the draft apart is reached by {rows[-1]['carrier']}\n", soft_wrap=True)
    for name, grid in maps.items():
        title = f"{name}: best k and its multiplier, by batch (down) and context (right)"
        console.print(f"[bold]{title}[/]", _map_table(scenario, grid), sep="\n")
        if any(cell["fits"] is False for row in grid for cell in row):
            console.print(f"{_NOT_FITTING}: does not fit")
        console.print()
    for file in figures.get("plots", []):
        console.print(f"wrote {file}", soft_wrap=True)


def _fits(scenario: Scenario, figures: Row) -> list[str]:
    """Return a line for each draft: the memory it needs together with the target, and the largest batch that fits."""
    if scenario.hardware.relative:
        return ["no device is named (--hardware): memory and the wire are not known"]
    rows = {row["draft"]: row for row in reversed(figures["drafts"])}
    return [_fit(scenario, name, rows[name]) for name in dict.fromkeys(row["draft"] for row in figures["drafts"])]


def _fit(scenario: Scenario, draft: str, row: Row) -> str:
    pair, device = f"{scenario.target_name} with draft {draft}", scenario.hardware.name
    needs = f"{_gb(row['needs_gb'])} GB (weights {_gb(row['weights_gb'])})"
    if row["fits"] is None:
        return f"fits? {pair} needs {needs}; how much memory {device} has is not known"
    largest, here = row["largest_batch"], f"at context {scenario.context:,}"
    most = f"the largest batch {here} is {largest:,}" if largest else f"no batch does {here}"
    verdict = "fits" if row["fits"] else "[bold red]does not fit[/]"
    taken = f"services take {SHARE_OF_FREE_MEMORY:.0%} of what is free behind the weights"
    return f"{verdict}: {pair} needs {needs} of the {row['memory_gb']:g} GB of {device}; {most} ({taken})"


def _gb(size: float) -> str:
    return f"{size:,.1f}" if size >= 1 else f"{size:.3f}"


def _relative_table(figures: Row) -> Table:
    table = Table("draft", box=SIMPLE_HEAD)
    for heading in ("parameters", "window", "τ", "Δt", "paper's", "saved of 10"):
        table.add_column(heading, justify="right")
    for row in figures["drafts"]:
        parameters, gain = row["body_parameters"], row["paper_multiplier"]
        size = f"{parameters / 1e9:.2f} · 10⁹" if parameters >= 1e9 else f"{parameters:,}"
        times = (f"{row['tau']:.3f}", f"{row['delta_t']:.3f}", Text(f"{gain:.3f}", style=_style(gain)))
        table.add_row(row["draft"], size, row["window"], *times, f"{row['units_saved']:.2f}")
    return table


def _points_table(figures: Row) -> Table:
    names = [row["draft"] for row in figures["drafts"]]
    rows = [("plain", figures["plain"])]
    for row in figures["drafts"]:
        rows.append((f"{row['draft']} {row['window']}" if names.count(row["draft"]) > 1 else row["draft"], row))
    return _costs_table(rows)


_COLUMNS = {
    "tau": ("τ", ".2f"),
    "draft_ms": ("draft", ".2f"),
    "wire_ms": ("wire", ".2f"),
    "verify_ms": ("verify", ".2f"),
    "round_ms": ("round", ".2f"),
    "tokens_per_second": ("tok/s", ",.0f"),
    "price_per_million_tokens": ("per 10⁶", ".3f"),
    "multiplier": ("× plain", ".2f"),
    "paper_multiplier": ("paper's", ".2f"),
}


def _costs_table(rows: list[tuple[str, Row]]) -> Table:
    """Return a table of costs. `paper's` is the multiplier by the paper's formula; `fits`: whether memory suffices."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("", no_wrap=True)
    shown = {key: look for key, look in _COLUMNS.items() if key in rows[0][1]}
    for heading, _ in shown.values():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for name, row in rows:
        style = "dim" if row["fits"] is False else ""
        figures = ("–" if row[key] is None else format(row[key], look) for key, (_, look) in shown.items())
        table.add_row(name, *figures, {True: "yes", False: "no", None: "?"}[row["fits"]], style=style)
    return table


def _map_table(scenario: Scenario, grid: Grid) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    for context in scenario.contexts:
        table.add_column(short(context), justify="right", no_wrap=True)
    for batch, row in zip(scenario.batches, grid, strict=True):
        table.add_row(short(batch), *map(_cell, row))
    return table


def _cell(cell: Row) -> Text:
    if cell["fits"] is False:
        return Text(_NOT_FITTING, style="dim")
    gain = f"{cell['multiplier']:.2f}"
    told = f"{cell['k']} {gain}" if cell["k"] else f"off {gain}".replace(" 0.", " .")
    return Text(told, style=_style(cell["multiplier"]))


def _style(gain: float) -> str:
    for least, style in ((2.0, "bold green"), (1.25, "green"), (1.0, "yellow")):
        if gain > least:
            return style
    return "red"
