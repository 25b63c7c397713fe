"""`spire bench`: measure the gain of speculation through the REST endpoint, beside the performance model's prediction.

    spire bench                                           the bundled toy at 1, 4 and 16 requests
    spire bench --drafts off,vanilla=DIR,magicdec,spire --batch 1,4,16,64 --context 128,512,1900 --k 0,4,auto
    spire bench --trace azure_llm_2023_conv.csv.xz --trace-seconds 60
    spire bench --url http://127.0.0.1:8000               services that already run
    spire bench --drafts spire --peers transformers --against http://127.0.0.1:9000
                                                          beside others; without --drafts only that server
    spire bench --shape llama-3-8b --layers 4 --accept-rate 0.8
                                                          no trained weights: SYNTHETIC acceptance, real time

For each draft, the services are started once and warmed up, then each load runs at all depths in turns. k = 0 is always
one of the depths, so that a multiplier compares runs of one warm system. `spire.bench.throughput` defines the figures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from spire.bench.cell import AUTO, SPIRE, Cell, Depth, chosen_depths
from spire.bench.chats import source_of
from spire.bench.load import Batch, Load, Trace, read_trace
from spire.bench.peers.against import Server
from spire.bench.peers.servers import check
from spire.checkpoints.tokenizer import load_tokenizer
from spire.cli.bench import report as bench_report
from spire.cli.bench.comparison import Chosen, Run
from spire.cli.options import Chats, Data, Dtype, Json, Layers, Model, Seed, Temperature, Url, numbers
from spire.cli.paths import OFF, TINY, Pair, choose_pair, random_pair
from spire.cli.serving import serving
from spire.cli.terminal import bar_or_lines, note
from spire.cli.up import ModelOptions
from spire.errors import SpireError
from spire.model.config import MAGICDEC, load_model_config
from spire.perf import calibration, plots
from spire.perf.calibration import Calibration
from spire.perf.shapes import SHAPES, Shape
from spire.service.keys import FOREIGN_KEY

_DEEPEST = 16


def bench(
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Drafts, with commas: off, spire (the bundled one), magicdec, a directory, NAME=DIR; each beside "
            "k = 0 in its own services. Default: spire for the bundled target, magicdec for another."
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at once; several with commas.")] = "1,4,16",
    context: Annotated[str, typer.Option(help="Tokens of each prompt; several with commas.")] = "512",
    generate: Annotated[int, typer.Option(help="Tokens generated after each prompt.", min=8)] = 128,
    k: Annotated[
        str, typer.Option(help="Speculation depths with commas; auto leaves it to the gateway. 0 is always measured.")
    ] = "4",
    repeats: Annotated[int, typer.Option(help="Runs of each cell, in turns; medians are shown.", min=1)] = 3,
    temperature: Temperature = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay arrivals and lengths of a CSV like the Azure LLM traces, instead of batches."),
    ] = None,
    trace_seconds: Annotated[float, typer.Option(help="Seconds of the trace to replay.", min=1)] = 60.0,
    rate: Annotated[float, typer.Option(help="Speed factor for the trace's arrivals.", min=0.001)] = 1.0,
    peers: Annotated[str | None, typer.Option(help="Peer to measure at the same batches: transformers.")] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="URL of another server of OpenAI's completions API, to measure too; alone unless --drafts. "
            f"The key in {FOREIGN_KEY} is sent along, if set."
        ),
    ] = None,
    as_text: Annotated[
        bool, typer.Option("--as-text", help="Send prompts as text, for a server with another tokenizer.")
    ] = False,
    url: Url = None,
    model: Model = None,
    shape: Annotated[
        str | None, typer.Option(help=f"Instead of a model: {', '.join(SHAPES)} with random weights; SYNTHETIC.")
    ] = None,
    layers: Layers = None,
    accept_rate: Annotated[
        float | None, typer.Option(help="Probability that a draft token is accepted, for --shape.", min=0, max=1)
    ] = None,
    dtype: Dtype = None,
    data: Data = None,
    chats: Chats = None,
    hardware: Annotated[
        Path | None,
        typer.Option(help="Calibration file for predictions. Default: the one spire doctor --calibrate wrote."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write bench.png (measured and modelled) here.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure tokens per second with and without speculation in one run, predict them, and split a round's time."""
    others = peers.split(",") if peers else []
    check(others)
    if others and shape:
        raise SpireError("--peers and --shape exclude each other: peers load weights, and a shape has none")
    if plot:
        plots.require()
    contexts, batches, depths = numbers(context), numbers(batch), _depths(k)
    with _pair(model, shape, layers, accept_rate, max(contexts) + generate) as (pair, title):
        stacks = [] if against and not (drafts or url) else _choose(drafts, pair, url)
        longest = load_model_config(pair.model).longest
        source = source_of(pair.model, data, chats)
        if trace is None:
            if max(contexts) + generate > longest:
                raise SpireError(
                    f"{max(contexts)} prompt tokens and {generate} more do not fit the target's {longest} positions: "
                    "lower --context or --generate"
                )
            grid = [(length, size) for length in contexts for size in batches]
            loads: list[Load] = [Batch(source, size, length, generate, temperature) for length, size in grid]
        else:
            loads = [Trace(source, read_trace(trace, longest, trace_seconds, rate), temperature, trace.name)]
        machine = _calibration(hardware, pair, dtype, accept_rate is not None)
        run = Run(loads, depths, repeats, seed, machine.hardware if machine else None, accept_rate)
        server = Server.meet(against, load_tokenizer(pair.model) if as_text else None) if against else None
        cells: list[Cell] = []
        with _told(cells, {"target": title, "temperature": temperature}, machine, as_json), bar_or_lines() as progress:
            for chosen in stacks:
                begun = f"asking {url}" if url else "starting the services"
                task = progress.add_task(f"{chosen.name}: {begun}", total=None)
                with serving(url, chosen.pair, ModelOptions(dtype), accept_rate) as system:
                    cells.extend(run.of(system, chosen, progress, task))
            if others:
                own = [chosen.pair.draft for chosen in stacks if chosen.pair.draft]
                cells.extend(run.peers(pair.model, own, dtype or "auto", cells, progress))
            if server:
                cells.extend(run.against(server, cells, progress))
        if plot:
            bench_report.plot(plot, cells)


@contextmanager
def _told(cells: list[Cell], measured: dict[str, Any], calibrated: Calibration | None, as_json: bool) -> Iterator[None]:
    """Print the measured cells when the block ends, even if by an error, so that earlier measurements are not lost."""
    complete = False
    try:
        yield
        complete = True
    finally:
        if as_json and cells:
            here = {"system": platform.platform(), "processor": platform.processor(), "cores": os.cpu_count()}
            machine = here | {"calibrated": asdict(calibrated.machine) if calibrated else None}
            auto = [asdict(choice) for choice in chosen_depths(cells)]
            found = {"bench": [cell.to_json() for cell in cells], "auto": auto, "complete": complete}
            typer.echo(json.dumps(found | measured | {"machine": machine}))
        elif cells:
            bench_report.show(cells, measured["target"])


def _choose(drafts: str | None, pair: Pair, url: str | None) -> list[Chosen]:
    """Return the drafts to measure. Plain decoding is measured beside each draft: `off` is kept only if alone."""
    if url and drafts is None:
        return [Chosen("as served", Pair(pair.model, None), known=False)]
    default = SPIRE if pair.draft else MAGICDEC
    wanted = [_named(text.strip(), pair) for text in (drafts or default).split(",")]
    stacks = [chosen for chosen in wanted if chosen.name != OFF] or wanted[:1]
    if url and len(stacks) > 1:
        raise typer.BadParameter("--url serves one draft: name it alone in --drafts, or none")
    return stacks


def _named(text: str, pair: Pair) -> Chosen:
    name, _, directory = text.partition("=")
    if directory or name in (OFF, MAGICDEC):
        return Chosen(name, choose_pair(pair.model, directory or name))
    if name == SPIRE:
        if pair.draft is None:
            raise SpireError(f"the bundled draft is not {pair.model}'s: name its own with --drafts spire=DIR")
        return Chosen(name, pair)
    if name == "vanilla":
        raise SpireError("no vanilla draft is bundled: train one (spire train draft) and name it: --drafts vanilla=DIR")
    if not Path(name).is_dir():
        raise SpireError(f"--drafts {name} is no directory and none of {OFF}, {SPIRE}, {MAGICDEC}, NAME=DIR")
    return Chosen(Path(name).name, choose_pair(pair.model, name))


@contextmanager
def _pair(
    model: Path | None, shape: str | None, layers: int | None, rate: float | None, longest: int
) -> Iterator[tuple[Pair, str]]:
    """Yield the pair to measure and its title: a model's pair, or one of random weights that exists during the block.

    `--drafts spire` selects the draft of the pair that is yielded.
    """
    if shape is None and rate is None:
        if layers is not None:
            raise SpireError("--layers belongs to --shape")
        pair = choose_pair(model, None)
        yield pair, str(model or TINY)
        return
    if shape is None or rate is None:
        raise SpireError("--accept-rate and --shape belong together: random weights accept nothing by themselves")
    if model is not None:
        raise SpireError("--model and --shape exclude each other: one names weights, the other has none")
    with random_pair(shape, layers, longest) as (pair, title):
        yield pair, f"{title}, random weights, SYNTHETIC acceptance {rate:g}"


def _depths(text: str) -> list[Depth]:
    depths: list[Depth] = [
        AUTO if part == AUTO else numbers(part, least=0)[0] for part in text.replace(" ", "").split(",")
    ]
    if wrong := [depth for depth in depths if depth != AUTO and depth > _DEEPEST]:
        raise typer.BadParameter(f"--k {wrong[0]}: a depth is at most {_DEEPEST}, or {AUTO}")
    return list(dict.fromkeys([0, *depths]))


def _calibration(file: Path | None, pair: Pair, dtype: str | None, synthetic: bool) -> Calibration | None:
    """Return the calibration in `file`. Without `file`: a new one if `synthetic`, else the default file's, or None."""
    if file is None and synthetic:  # in a child process, so that all memory is freed
        with tempfile.TemporaryDirectory(prefix="spire-") as directory:
            out = Path(directory) / "calibration.json"
            command = [sys.executable, "-m", "spire.cli", "doctor", "--calibrate", "--out", str(out), "--json"]
            command += ["--model", str(pair.model), "--draft", str(pair.draft), *(["--dtype", dtype] if dtype else [])]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return calibration.load(out)
    if file is None and not calibration.default_file().is_file():
        note("no modelled figures: measure this machine once with 'spire doctor --calibrate'")
        return None
    found = calibration.load(file or calibration.default_file())
    if found.target != Shape.of(load_model_config(pair.model)) or dtype not in (None, "auto", found.dtype):
        note(f"modelled figures are of another target or type: the calibration is of {found.target}, {found.dtype}")
    return found
