"""`spire doctor --calibrate`: run microbenchmarks with a progress bar, write the results to a file, print a summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spire.cli.paths import Pair
from spire.errors import SpireError
from spire.model.config import DraftConfig, ModelConfig, load_draft_config, load_model_config
from spire.perf.calibration import Calibration, save, to_json
from spire.perf.shapes import Shape, trained_draft


def measure_machine(pair: Pair, file: Path, dtype: str, as_json: bool) -> None:
    """Calibrate at the widths of this pair, write `file`, print a summary or JSON. Raises SpireError without torch."""
    target = load_model_config(pair.model)
    draft = _spire_draft(pair, target)
    try:
        from spire.perf.calibrator import PASSES, STEPS, calibrate
    except ImportError as error:
        raise SpireError(f"measuring needs torch: pip install 'spire-serve[model]' ({error})") from error
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as progress:
        task, done = progress.add_task("", total=PASSES * len(STEPS)), count()

        def begin(step: str) -> None:
            progress.update(task, description=step, completed=next(done))

        found = calibrate(target, draft, begin=begin, dtype=dtype)
        progress.update(task, completed=next(done))
    save(found, file)
    if as_json:
        typer.echo(json.dumps({"file": str(file), "calibration": json.loads(to_json(found))}))
        return
    console = Console(highlight=False)
    console.print(_summary(found))
    console.print(f"wrote {file}; use it with: spire perf-model --hardware calibrated", soft_wrap=True)


def _spire_draft(pair: Pair, target: ModelConfig) -> DraftConfig:
    """Return the configuration of the pair's draft if it uses target activations, else that of the paper's rule."""
    if pair.draft is not None and (config := load_draft_config(pair.draft)).tapped_layers:
        return config
    layers, rule = target.num_hidden_layers, trained_draft("spire", Shape.of(target))
    tapped = tuple(range(layers - rule.shape.layers, layers))
    return DraftConfig(target_fingerprint="", tapped_layers=tapped, window=rule.window or 0, sink=rule.sink)


def _summary(found: Calibration) -> Table:
    table = Table("measured", "value", box=None, padding=(0, 2, 0, 0))
    for name, value in _figures(found):
        table.add_row(name, value)
    return table


def _figures(found: Calibration) -> Iterator[tuple[str, str]]:
    hardware, measured = found.hardware, found.hardware.measured
    assert measured is not None
    yield "device", f"{hardware.name}, {found.dtype}; {found.took_seconds} s"
    for dtype, matmul in found.matmul.items():
        speeds = " · ".join(f"{speed / 1e9:,.0f}" for _, speed in matmul)
        yield f"products, {dtype}", f"{speeds} GFLOP/s at {' · '.join(str(rows) for rows, _ in matmul)} rows"
    yield "reading memory", f"{hardware.bytes_per_second / 1e9:.1f} GB/s"
    read = measured.kv_read
    speeds = " · ".join(f"{1e-9 / seconds:.1f}" for _, seconds in read.points)
    yield "reading keys and values", f"{speeds} GB/s for {' · '.join(f'{n:g}' for n, _ in read.points)} tokens"
    for name, costs in (("target", measured.target), ("draft", measured.draft)):
        rows = f"{costs.layer.at(1) * 1e3:.3f} ms at 1 row, {costs.layer.at(80) * 1e3:.3f} at 80"
        yield f"rest of a {name} layer", rows
        row = costs.sampling.at(found.target.vocab_size) * 1e6
        yield f"{name}'s sampling", f"{row:,.0f} µs a row of {found.target.vocab_size:,}"
    yield "wire", f"{measured.wire.fixed * 1e3:.3f} ms a round trip, {1e-9 / max(measured.wire.each, 1e-15):.2f} GB/s"
