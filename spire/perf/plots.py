"""Figures of the performance model: the paper's Figures 3, 4 and 6, a map of the best k, measured versus modelled.

`--plot DIR` of `spire perf-model` and `spire bench` needs matplotlib: pip install 'spire-serve[plot]'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spire.errors import SpireError
from spire.perf.hardware import Hardware
from spire.perf.perf_model import critical_context, operational_intensity
from spire.perf.shapes import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BELOW, _ABOVE, _NEUTRAL = "#b35806", "#01665e", "#f5f5f5"
_OFF = "#d9d9d9"
_NOT_FITTING = "–"
_LARGEST_BATCH = 2**14

# `k`, `multiplier` and `fits`, as in the map of `spire perf-model --json`.
MapCell = dict[str, Any]


def require() -> None:
    """Raise SpireError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SpireError("plots need matplotlib: pip install 'spire-serve[plot]'") from error


def short(n: int) -> str:
    """Format 1024 as 1k, 1048576 as 1M, and numbers that are not multiples of 1024 in full."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return str(n)


def write_speedup(
    file: Path, title: str, panels: dict[str, list[list[float | None]]], batches: Sequence[int], contexts: Sequence[int]
) -> None:
    """Plot multipliers by batch (rows) and context (columns), one panel per draft, as in Figures 4 and 6.

    None marks a cell whose batch does not fit into the device's memory.
    """
    figure, axes = _grids(title, list(panels), batches, contexts)
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    values = [value for grid in panels.values() for row in grid for value in row if value is not None]
    norm = TwoSlopeNorm(1, vmin=min([0.5, *values]), vmax=max([1.5, *values]))
    colours = LinearSegmentedColormap.from_list("speedup", (_BELOW, _NEUTRAL, _ABOVE))
    for axis, grid in zip(axes, panels.values(), strict=True):
        numbers = [[math.nan if value is None else value for value in row] for row in grid]
        image = axis.imshow(numbers, norm=norm, cmap=colours, aspect="auto")
        for row, values_of_row in enumerate(grid):
            for column, value in enumerate(values_of_row):
                dark = value is not None and abs(norm(value) - 0.5) > 0.36
                text = _NOT_FITTING if value is None else f"{value:.2f}"
                _write(axis, column, row, text, "white" if dark else "black")
    figure.colorbar(image, ax=axes, pad=0.015, aspect=28, label="throughput over plain decoding")
    figure.savefig(file, dpi=150)


def write_map(
    file: Path, title: str, panels: dict[str, list[list[MapCell]]], batches: Sequence[int], contexts: Sequence[int]
) -> None:
    """Plot the best depth `k` and its `multiplier` by batch and context; hatched grey if speculation is off (`k` = 0).

    `fits` is False in a cell whose batch does not fit into the device's memory.
    """
    figure, axes = _grids(title, list(panels), batches, contexts)
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Rectangle

    fitting = [cell for grid in panels.values() for row in grid for cell in row if cell["fits"] is not False]
    deepest = max([2, *(cell["k"] for cell in fitting)])
    shades = [_shade((k - 1) / (deepest - 1)) for k in range(1, deepest + 1)]
    for axis, grid in zip(axes, panels.values(), strict=True):
        axis.set_xlim(-0.5, len(contexts) - 0.5)
        axis.set_ylim(len(batches) - 0.5, -0.5)
        for row, cells in enumerate(grid):
            for column, cell in enumerate(cells):
                if cell["fits"] is False:
                    _write(axis, column, row, _NOT_FITTING, "black")
                    continue
                k = cell["k"]
                look: dict[str, Any] = {"facecolor": shades[k - 1]} if k else {"facecolor": _OFF, "hatch": "////"}
                axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, linewidth=0.5, edgecolor="white", **look))
                text = f"k={k}\n{cell['multiplier']:.2f}" if k else "off"
                _write(axis, column, row, text, "white" if k > deepest / 2 else "black")
    shown = ScalarMappable(BoundaryNorm([k + 0.5 for k in range(deepest + 1)], deepest), ListedColormap(shades))
    label, ticks = "best speculation depth k", range(1, deepest + 1)
    figure.colorbar(shown, ax=axes, pad=0.015, aspect=28, ticks=ticks, label=label)
    figure.savefig(file, dpi=150)


def write_intensity(file: Path, title: str, target: Shape, contexts: Sequence[int], k: int, hardware: Hardware) -> None:
    """Plot the FLOPs per byte of verification by batch, a curve per context, and those of the hardware (Figure 3)."""
    figure = _figure(7.5, 4.8)
    axis = figure.add_subplot()
    batches = [2**exponent for exponent in range(_LARGEST_BATCH.bit_length())]
    longest = critical_context(target, k, hardware)
    for index, context in enumerate(contexts):
        curve = [operational_intensity(target, batch, context, k, hardware.bytes_per_value) for batch in batches]
        critical = context == longest
        colour = _shade(1 - index / max(1, len(contexts) - 1))
        axis.plot(batches, curve, color=colour, linewidth=2.6 if critical else 1.3)
        label = f"L = {short(context)}" + (", the critical context" if critical else "")
        axis.annotate(label, (batches[-1], curve[-1]), (5, 0), textcoords="offset points", va="center", fontsize=8)
    hoi = hardware.operational_intensity
    axis.axhline(hoi, color=_BELOW, linestyle="--", linewidth=1.2, label=f"hardware: {hoi:,.0f} FLOPs per byte")
    axis.legend(loc="upper left", frameon=False, labelcolor=_BELOW, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlim(1, _LARGEST_BATCH)
    axis.set_xticks(batches[::2], [short(batch) for batch in batches[::2]])
    axis.set_xlabel("batch size B")
    axis.set_ylabel(f"FLOPs per byte of verifying k = {k} tokens")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=12)
    figure.savefig(file, dpi=150)


def write_fronts(file: Path, title: str, curves: dict[str, list[tuple[float, float]]]) -> None:
    """Plot verifications over discarded draft tokens, both for each generated token: a curve for each rule of stopping,
    a mark for a rule with one setting."""
    figure = _figure(7.5, 4.8)
    axis = figure.add_subplot()
    for name, points in curves.items():
        xs, ys = zip(*sorted(points), strict=True)
        axis.plot(xs, ys, marker="o" if len(points) > 1 else "*", markersize=3 if len(points) > 1 else 12, label=name)
    axis.set_xlabel("discarded draft tokens for each generated token")
    axis.set_ylabel("verifications for each generated token")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=12)
    figure.savefig(file, dpi=150)


def write_calibration(file: Path, title: str, groups: list[tuple[float, float, float]]) -> None:
    """Plot the share of draft tokens that are accepted over the prediction of a stop head, for groups of tokens by the
    prediction: (prediction, accepted, share of all tokens), which a bubble's area tells."""
    figure = _figure(5.2, 4.8)
    axis = figure.add_subplot()
    predicted, accepted, shares = zip(*groups, strict=True)
    axis.plot((0, 1), (0, 1), color=_OFF, linestyle="--", linewidth=1)
    axis.scatter(predicted, accepted, s=[900 * share for share in shares], color=_ABOVE, alpha=0.7)
    axis.plot(predicted, accepted, color=_ABOVE, linewidth=1)
    axis.set_xlabel("predicted probability that a draft token is accepted")
    axis.set_ylabel("share that is accepted")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=12)
    figure.savefig(file, dpi=150)


def write_multipliers(file: Path, title: str, panels: dict[str, list[tuple[str, float | None, float | None]]]) -> None:
    """Plot throughput relative to plain decoding: a panel per draft, (name, measured, modelled) per cell."""
    figure = _figure(1.6 + 0.62 * max(map(len, panels.values())), 0.6 + 2.4 * len(panels))
    for axis, (name, cells) in zip(figure.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True):
        for column, (label, colour) in enumerate((("measured", _ABOVE), ("modelled", _OFF))):
            heights = [cell[1 + column] or 0.0 for cell in cells]
            bars = axis.bar([at + 0.4 * column for at in range(len(cells))], heights, 0.38, label=label, color=colour)
            axis.bar_label(bars, [f"{height:.2f}" if height else "" for height in heights], fontsize=7)
        axis.axhline(1, color=_BELOW, linestyle="--", linewidth=1)
        axis.set_xticks([at + 0.2 for at in range(len(cells))], [cell[0] for cell in cells], fontsize=7)
        axis.set_ylabel("over plain decoding")
        axis.set_title(name, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    figure.savefig(file, dpi=150)


def _figure(width: float, height: float) -> Figure:
    require()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _grids(title: str, names: list[str], batches: Sequence[int], contexts: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """Return a figure with one grid of batches and contexts for each name, at most three side by side."""
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = _figure(1.8 + 0.58 * len(contexts) * columns, 0.5 + (1.0 + 0.42 * len(batches)) * rows)
    figure.suptitle(title, fontsize=12)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(names) :]:
        axis.remove()
    for axis, name in zip(axes, names, strict=False):
        axis.set_title(name, fontsize=11)
        axis.set_xticks(range(len(contexts)), [short(context) for context in contexts])
        axis.set_yticks(range(len(batches)), [short(batch) for batch in batches])
        axis.set_xlabel("context L")
        axis.set_ylabel("batch size B")
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    return figure, axes[: len(names)]


def _write(axis: Axes, column: int, row: int, text: str, colour: str) -> None:
    axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)


def _shade(share: float) -> tuple[float, float, float]:
    """Return the RGB values of a teal from light (`share` 0) to dark (1)."""
    light, dark = (0.78, 0.92, 0.90), (0.0, 0.30, 0.28)
    red, green, blue = (a + share * (b - a) for a, b in zip(light, dark, strict=True))
    return red, green, blue
