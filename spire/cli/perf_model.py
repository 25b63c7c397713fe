"""`spire perf-model`: what speculation gains on a model and a machine, and where to switch it off. Nothing runs.

    spire perf-model --target seqax-67m --draft vanilla --draft magicdec --draft spire
    spire perf-model --target bundled --hardware calibrated

The formula and every symbol: docs/performance-model.md.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spire import calibration
from spire import perf_model as model
from spire.bench.acceptance import RECORD, read_record
from spire.bench.prediction import served_draft
from spire.cli import perf_report
from spire.cli.paths import BUNDLED
from spire.cli.perf_report import Apart, Candidate, Scenario
from spire.errors import SpireError
from spire.hardware import GPUS, LOCAL_STREAM, Cost, Hardware, gpu
from spire.model.config import load_model_config

_KINDS: dict[str, model.DraftKind] = {"vanilla": "vanilla", "magicdec": "magicdec", "spire": "spire"}
_POWERS = [2**exponent for exponent in range(21)]


@dataclass(frozen=True)
class Target:
    """A target by name. `directory` is None for the paper's two, whose drafts have a published τ."""

    name: str
    shape: model.Shape
    context: int
    contexts: list[int]
    directory: Path | None = None


_PAPER_TARGETS = {
    "seqax-67m": Target("seqax-67m", model.SEQAX_67M, 512, _POWERS[5:14]),
    "llama-3-70b": Target("llama-3-70b", model.LLAMA_3_70B, 65536, _POWERS[12:]),
}


def perf_model(
    target: Annotated[
        str, typer.Option(help="seqax-67m or llama-3-70b (the paper's), bundled, or a checkpoint directory.")
    ] = "seqax-67m",
    draft: Annotated[
        list[str] | None,
        typer.Option(help="vanilla, magicdec, spire, or a draft's directory; repeatable. Default: spire."),
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
        str | None, typer.Option(help="Instead of τ: shares of rounds whose first 1, 2, ... draft tokens all stand.")
    ] = None,
    hoi: Annotated[float, typer.Option(help="FLOPs per byte of the hardware, where --hardware names none.")] = 600.0,
    hardware: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(GPUS)}, 'calibrated' (spire doctor --calibrate), or a calibration file."),
    ] = None,
    bytes_per_value: Annotated[
        int | None,
        typer.Option("--bytes", help="Bytes of a weight or cached value. Default: 1 with --hoi, 2 on a GPU."),
    ] = None,
    devices: Annotated[int, typer.Option(help="How many of --hardware share the target without loss.", min=1)] = 1,
    window: Annotated[
        str | None, typer.Option(help="'paper' (L/8) or positions. Default: what is served, beside the paper's.")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Batches of the map, with commas. Default: 1 to 128.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Contexts of the map, with commas.")] = None,
    split: Annotated[bool, typer.Option("--split", help="Also model the draft on a device of its own.")] = False,
    draft_hardware: Annotated[
        str | None, typer.Option(help="That device, as for --hardware. Default: the same as the target's.")
    ] = None,
    lanes: Annotated[
        int, typer.Option(help="Groups in flight: with 2 one is drafted while the other is verified.", min=1, max=2)
    ] = 2,
    round_trip_ms: Annotated[
        float | None, typer.Option(help="Of a stream to the draft. Default: calibrated, or 0.14.", min=0)
    ] = None,
    wire_gb_per_s: Annotated[
        float | None, typer.Option(help="Of that stream, in 10⁹ bytes. Default: calibrated, or 1.7.", min=0.001)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of an hour of one --hardware device.", min=0)] = None,
    draft_price: Annotated[
        float | None, typer.Option(help="Of an hour of one of the draft's devices. Default: --price.", min=0)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write speedup.png, intensity.png and map.png here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Predict what speculation gains, and map where to switch it off. Pure arithmetic: no model is loaded.

    The multiplier is throughput over plain decoding of the same model: τ / Δt, where Δt is how much longer a round of
    speculation takes than a plain step. The map gives the best depth k for every batch and context, or "off".

    The paper's table, and its Llama-3-70B:

        spire perf-model --draft vanilla --draft magicdec --draft spire

        spire perf-model --target llama-3-70b --window paper --plot figures

    Your own model on a GPU (τ and acceptance are printed by: spire eval acceptance):

        spire perf-model --target DIR --draft DRAFT_DIR --tau 3.1 --hardware h100

    This machine, as measured by spire doctor --calibrate:

        spire perf-model --target bundled --hardware calibrated

    The draft on a device of its own, with its price:

        spire perf-model --target llama-3-70b --hardware h100 --devices 8 --split --draft-hardware l4
        --price 2.5 --draft-price 0.7
    """
    goal = _target(target)
    wanted = draft or ["spire"]
    given = _acceptance(tau, acceptance, k, wanted)
    machine = _hardware(hardware, hoi, bytes_per_value, goal.shape).times(devices)
    scenario = Scenario(
        goal.name,
        goal.shape,
        [_candidate(name, goal, given, context or goal.context, window, machine) for name in wanted],
        machine,
        batch,
        context or goal.context,
        k,
        max_k,
        _numbers(batches) if batches else _POWERS[:8],
        _numbers(contexts) if contexts else goal.contexts,
    )
    figures = perf_report.report(scenario)
    if split:
        apart = _hardware(draft_hardware, hoi, bytes_per_value, goal.shape) if draft_hardware else machine
        stream = _stream(machine, round_trip_ms, wire_gb_per_s)
        prices = _prices(price, devices, draft_price, 1 if draft_hardware else devices)
        figures["deployments"] = perf_report.deployments(scenario, Apart(apart, stream, lanes, prices))
    maps = {each.name: perf_report.choices(scenario, each) for each in scenario.candidates}
    if plot:
        figures["plots"] = [str(file) for file in perf_report.plot(plot, scenario, maps)]
    if as_json:
        typer.echo(json.dumps(figures | {"map": perf_report.cells(scenario, maps)}))
    else:
        perf_report.show(scenario, figures, maps)


# --- what was asked ---------------------------------------------------------------------------------------------------


def _target(name: str) -> Target:
    if name in _PAPER_TARGETS:
        return _PAPER_TARGETS[name]
    directory = BUNDLED / "target" if name == "bundled" else Path(name)
    if name != "bundled" and not directory.is_dir():
        known = ", ".join([*_PAPER_TARGETS, "bundled"])
        raise SpireError(f"--target {name} is no directory and none of {known}")
    config = load_model_config(directory)
    longest = config.max_position_embeddings
    contexts = [context for context in _POWERS if 32 <= context <= longest][-9:]
    return Target(name, model.Shape.of(config), min(512, longest), contexts or [longest], directory)


def _candidate(
    name: str, goal: Target, given: model.Acceptance | None, context: int, window: str | None, machine: Hardware
) -> Candidate:
    served = _draft(name, goal)
    acceptance = given or _recorded(name, goal, context) or _published(name, goal)
    if served.kind == "vanilla":
        return Candidate(name, acceptance, {"all": served})
    rules = [served.window, None] if window is None else [None if window == "paper" else _numbers(window)[0]]
    if machine.measured and served.kind == "spire":
        if rules[0] != served.window:
            raise SpireError(f"--window {window}: a SPIRe draft's pass was measured with its own window")
        rules = [served.window]
    return Candidate(name, acceptance, {_window_name(rule): replace(served, window=rule) for rule in rules})


def _draft_directory(name: str, goal: Target) -> Path | None:
    """Of a draft that exists; None for one that is only modelled."""
    if goal.directory == BUNDLED / "target" and name == "spire":
        return BUNDLED / "draft"
    return None if name in _KINDS else Path(name)


def _draft(name: str, goal: Target) -> model.Draft:
    directory = _draft_directory(name, goal)
    if directory is None:
        return model.paper_draft(_KINDS[name], goal.shape)
    if not directory.is_dir():
        raise SpireError(f"--draft {name} is no directory and none of {', '.join(_KINDS)}")
    return served_draft(directory)


def _window_name(window: int | None) -> str:
    return "L/8" if window is None else str(window)


def _acceptance(tau: float | None, shares: str | None, k: int, drafts: list[str]) -> model.Acceptance | None:
    if tau is None and shares is None:
        return None
    if tau is not None and shares is not None:
        raise typer.BadParameter("--tau and --acceptance say the same thing: give one of them")
    if len(drafts) > 1:
        raise typer.BadParameter("--tau and --acceptance belong to one draft: give one --draft")
    if tau is not None:
        return model.Acceptance.of_tau(tau, k)
    return model.Acceptance(tuple(_shares(shares or "")))


def _recorded(name: str, goal: Target, context: int) -> model.Acceptance | None:
    """What was measured of a draft and is kept with it, at the nearest context; None where nothing is kept."""
    directory = _draft_directory(name, goal)
    if directory is None or not (file := directory / RECORD).is_file():
        return None
    cells = read_record(file)
    nearest = min(cells, key=lambda cell: abs(math.log(cell.context / context)))
    return model.Acceptance(tuple(nearest.prefix_acceptance))


def _published(name: str, goal: Target) -> model.Acceptance:
    """The paper's τ, which it also assumes for Llama-3-70B. Raises SpireError where only a measurement could tell."""
    if goal.directory is None and name in _KINDS:
        return model.Acceptance.of_tau(model.PAPER_TAU[_KINDS[name]], model.PAPER_K)
    raise SpireError(
        f"no τ is known of draft {name} for target {goal.name}: measure it with 'spire eval acceptance' while the pair "
        "is served, and give --tau, or --acceptance with the shares it prints"
    )


def _hardware(name: str | None, hoi: float, bytes_per_value: int | None, shape: model.Shape) -> Hardware:
    if name is None:
        return Hardware.of_intensity(hoi, bytes_per_value or 1)
    if name in GPUS:
        return gpu(name, bytes_per_value or 2)
    file = calibration.default_file() if name == calibration.CALIBRATED else Path(name)
    if name != calibration.CALIBRATED and not file.is_file():
        known = ", ".join([*GPUS, calibration.CALIBRATED])
        raise SpireError(f"--hardware {name} is no file and none of {known}")
    found = calibration.load(file)
    if bytes_per_value not in (None, found.hardware.bytes_per_value):
        raise SpireError(f"--bytes {bytes_per_value}: {file} was measured with {found.dtype}")
    if found.target != shape:
        note = f"{file} was measured at the widths of another target: {found.target}"
        Console(stderr=True, highlight=False).print(f"[yellow]note:[/] {note}")
    return found.hardware


def _stream(machine: Hardware, round_trip_ms: float | None, gb_per_s: float | None) -> Cost:
    stream = machine.measured.wire if machine.measured else Cost() if machine.relative else LOCAL_STREAM
    if machine.relative and (round_trip_ms is not None or gb_per_s is not None):
        raise SpireError("a wire's seconds need a device's: name one with --hardware")
    fixed = stream.fixed if round_trip_ms is None else round_trip_ms / 1000
    return Cost(fixed, stream.each if gb_per_s is None else 1e-9 / gb_per_s)


def _prices(
    price: float | None, devices: int, draft_price: float | None, draft_devices: int
) -> tuple[float, float] | None:
    if price is None:
        return None
    return price * devices, (price if draft_price is None else draft_price) * draft_devices


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers like 1,4,16") from error
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} has a number below 1")
    return numbers


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of shares like 0.8,0.6,0.5") from error
