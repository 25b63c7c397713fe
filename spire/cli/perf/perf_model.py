"""`spire perf-model`: predict the gain of speculation for a model and a machine, and where to switch speculation off.

No model runs. `spire perf-model --help` shows examples; docs/performance-model.md explains formula and symbols.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from spire.cli.options import Json, numbers
from spire.cli.perf import perf_report, perf_tables
from spire.cli.perf.perf_options import POWERS, find_acceptance, find_candidate, find_hardware, find_target, find_wire
from spire.cli.perf.perf_report import Apart, Scenario
from spire.errors import SpireError
from spire.perf.hardware import GPUS
from spire.perf.shapes import SHAPES


def perf_model(
    target: Annotated[
        str,
        typer.Option(help=f"{', '.join(SHAPES)}, tiny, smollm2, or a directory with a config.json."),
    ] = "seqax-67m",
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="vanilla, magicdec, spire (as training makes them by default), or a draft's directory; repeatable. "
            "Default: spire."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once, for the table.", min=1)] = 64,
    context: Annotated[
        int | None, typer.Option(help="Positions in the target's cache. Default: 512, for Llama-3-70B 65536.", min=1)
    ] = None,
    k: Annotated[int, typer.Option(help="Speculation depth of the table; the τ given is at this depth.", min=1)] = 4,
    max_k: Annotated[int, typer.Option(help="Deepest k that the map may choose.", min=1)] = 8,
    tau: Annotated[
        float | None, typer.Option(help="Mean tokens a round at depth k. Default: the paper's, for its targets.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Instead of τ: shares of rounds in which the first 1, 2, ... draft tokens are all accepted."),
    ] = None,
    hoi: Annotated[float, typer.Option(help="FLOPs per byte of the hardware, without --hardware.")] = 600.0,
    hardware: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(GPUS)}, 'calibrated' (spire doctor --calibrate), or a calibration file."),
    ] = None,
    bytes_per_value: Annotated[
        int | None,
        typer.Option("--bytes", help="Bytes of a weight or cached value. Default: 1 with --hoi, 2 on a GPU."),
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices of --hardware that share the target, without loss.", min=1)] = 1,
    window: Annotated[
        str | None,
        typer.Option(
            help="The draft's window: 'paper' (L/8) or positions. Default: as served; for the paper's targets both."
        ),
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Batches of the map, with commas. Default: 1 to 128.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Contexts of the map, with commas.")] = None,
    split: Annotated[bool, typer.Option("--split", help="Also model the draft on a device of its own.")] = False,
    draft_hardware: Annotated[str | None, typer.Option(help="The draft's --hardware. Default: the target's.")] = None,
    carrier: Annotated[
        str | None,
        typer.Option(
            help="Carrier to a draft on its own device: shared_memory (one host) or grpc (two). "
            "Default: grpc with --draft-hardware."
        ),
    ] = None,
    lanes: Annotated[
        int, typer.Option(help="Batches in flight: with 2, one is drafted while the other is verified.", min=1, max=2)
    ] = 2,
    round_trip_ms: Annotated[
        float | None,
        typer.Option(help="Round trip of a message to a draft on its own device. Default: calibrated, or 0.14.", min=0),
    ] = None,
    wire_gb_per_s: Annotated[
        float | None,
        typer.Option(help="Bandwidth to a draft on its own device, in 10⁹ bytes/s. Default: the carrier's.", min=0.001),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of one --hardware device for an hour.", min=0)] = None,
    draft_price: Annotated[
        float | None, typer.Option(help="Price of one of the draft's devices for an hour. Default: --price.", min=0)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write speedup.png, intensity.png and map.png here.")] = None,
    as_json: Json = False,
) -> None:
    """Predict what speculation gains, and map where to switch it off. Pure arithmetic: no model is loaded.

    The multiplier is throughput over plain decoding of the same model: τ / Δt, where Δt is how much longer a round
    takes than a plain step. With --hardware, the multiplier has every known cost and the paper's is shown, too; without
    --hardware, only the paper's is shown. The map gives the best depth k for every batch and context, or "off".

    The paper's table, and its Llama-3-70B:

        spire perf-model --draft vanilla --draft magicdec --draft spire

        spire perf-model --target llama-3-70b --window paper --plot figures

    Your own model on a GPU (τ and acceptance are printed by: spire eval acceptance), and whether it fits:

        spire perf-model --target DIR --draft DRAFT_DIR --tau 3.1 --hardware h100 --batch 32 --context 8192

    This machine, as measured by spire doctor --calibrate:

        spire perf-model --target tiny --hardware calibrated

    The draft on a device of its own, with its price:

        spire perf-model --target llama-3-70b --hardware h100 --devices 8 --split --draft-hardware l4
        --price 2.5 --draft-price 0.7
    """
    needs_split = {
        "draft-hardware": draft_hardware,
        "carrier": carrier,
        "round-trip-ms": round_trip_ms,
        "wire-gb-per-s": wire_gb_per_s,
        "draft-price": draft_price,
    }
    for name, value in needs_split.items():
        if value is not None and not split:
            raise SpireError(f"--{name} is about a draft on a device of its own: give --split too")
    if price is not None and hardware is None:
        raise SpireError("--price needs the seconds of a device: name one with --hardware")
    goal = find_target(target)
    wanted = draft or ["spire"]
    given = find_acceptance(tau, acceptance, k, wanted)
    machine = find_hardware(hardware, hoi, bytes_per_value, goal.shape).times(devices)
    (here,) = goal.check("--context", [context or goal.context])
    columns = goal.check("--contexts", numbers(contexts)) if contexts else goal.contexts
    candidates = [find_candidate(name, goal, given, here, window, machine) for name in wanted]
    rows = numbers(batches) if batches else POWERS[:8]
    hourly = None if price is None else price * devices
    scenario = Scenario(
        goal.name, goal.shape, goal.tied, candidates, machine, hourly, batch, here, k, max_k, rows, columns
    )
    apart = None
    if split:
        wire = find_wire(carrier, machine, draft_hardware is not None, round_trip_ms, wire_gb_per_s)
        its = find_hardware(draft_hardware, hoi, bytes_per_value, goal.shape) if draft_hardware else machine
        each = price if draft_price is None else draft_price
        apart = Apart(its, wire, lanes, None if each is None else each * (1 if draft_hardware else devices))
    figures = perf_report.report(scenario, apart)
    maps = {each.name: perf_report.grid(scenario, each) for each in scenario.candidates}
    if plot:
        figures["plots"] = [str(file) for file in perf_report.plot(plot, scenario, maps)]
    if as_json:
        typer.echo(json.dumps(figures | {"map": [cell for grid in maps.values() for row in grid for cell in row]}))
    else:
        perf_tables.show(scenario, figures, maps)
