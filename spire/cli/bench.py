"""`spire bench`: what speculation gains through the REST endpoint, measured beside what the performance model says.

    spire bench                                           the bundled pair at 1, 4 and 16 requests
    spire bench --drafts off,vanilla=DIR,magicdec,spire --batch 1,4,16,64 --context 128,512,1900 --k 0,4,auto
    spire bench --trace azure_llm_2023_conv.csv.xz --trace-seconds 60
    spire bench --url http://127.0.0.1:8000               services that run already
    spire bench --drafts spire --peers transformers --against http://127.0.0.1:9000
                                                          beside others; without --drafts only that server

For each draft the services are started once, warmed, and every load runs at every depth in turns, k = 0 always among
them: a multiplier compares runs of one warm system. What the figures mean: `spire.bench.throughput`.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from spire import calibration, plots
from spire.bench.against import Server
from spire.bench.cell import AUTO, SPIRE, Cell, Depth
from spire.bench.load import Batch, Load, Trace, alternate, read_trace
from spire.bench.peers import TRANSFORMERS, Task, assistant_of, check, run_transformers
from spire.bench.peers import cells as peer_cells
from spire.bench.prediction import Model
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.bench.system import System
from spire.calibration import Calibration
from spire.cli import bench_report
from spire.cli.paths import OFF, Pair, choose_pair
from spire.cli.serving import serving
from spire.cli.up import ModelOptions
from spire.errors import SpireError
from spire.hardware import Hardware
from spire.model.config import MAGICDEC, load_model_config
from spire.perf_model import Shape

_DEEPEST = 16
_WARM_TOKENS, _WARM_REQUESTS = 16, 4
# Tokens a peer looks up at once where no depth is asked for.
_LOOKED_UP = 4


def bench(
    drafts: Annotated[
        str | None,
        typer.Option(
            help="With commas: off, spire (the bundled one), magicdec, a directory, NAME=DIR. Each is measured beside "
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
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of batches: arrivals and lengths of a CSV like the Azure LLM traces.")
    ] = None,
    trace_seconds: Annotated[float, typer.Option(help="How long its load lasts.", min=1)] = 60.0,
    rate: Annotated[float, typer.Option(help="Its arrivals this many times as fast.", min=0.001)] = 1.0,
    peers: Annotated[str | None, typer.Option(help="What else to measure at the same batches: transformers.")] = None,
    against: Annotated[
        str | None,
        typer.Option(help="URL of any server of OpenAI's completions that gets the same load; alone unless --drafts."),
    ] = None,
    as_text: Annotated[
        bool, typer.Option("--as-text", help="It gets prompts as text: its tokenizer is another.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="A gateway that runs already. Default: services are started.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="The target; its tokenizer cuts prompts. Default: the bundled one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or directories to cut prompts from; repeatable. Default: bundled."),
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="Calibration file of the model's figures. Default: spire doctor --calibrate's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write bench.png here: measured beside modelled.")] = None,
    seed: Annotated[int, typer.Option(help="Decides where prompts are cut.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Tokens per second with and without speculation in one run, beside the model's, and where a round's time goes."""
    others = peers.split(",") if peers else []
    check(others)
    if plot:
        plots.require()
    stacks = [] if against and not (drafts or url) else _choose(drafts, model, url)
    pair = choose_pair(model, OFF)
    source = PromptSource(pair.model, data or [BUNDLED_TEXT])
    longest = load_model_config(pair.model).max_position_embeddings
    if trace is None:
        grid = [(length, size) for length in _numbers(context) for size in _numbers(batch)]
        _refuse_too_long(max(length for length, _ in grid), generate, longest)
        loads: list[Load] = [Batch(source, size, length, generate, temperature) for length, size in grid]
    else:
        loads = [Trace(source, read_trace(trace, longest, trace_seconds, rate), temperature, trace.name)]
    machine = _calibration(hardware, Shape.of(load_model_config(pair.model)), dtype)
    run = Run(loads, _depths(k), repeats, seed, machine.hardware if machine else None)
    tokenizer = Tokenizer.from_file(str(pair.model / "tokenizer.json")) if as_text else None
    server = Server.meet(against, tokenizer) if against else None
    cells: list[Cell] = []
    complete = False
    try:
        with _progress(as_json) as progress:
            for chosen in stacks:
                with serving(url, chosen.pair, ModelOptions(dtype, None, None)) as system:
                    cells.extend(run.of(system, chosen, progress))
            if others:
                own = [chosen.pair.draft for chosen in stacks if chosen.pair.draft]
                cells.extend(run.peers(pair.model, own, dtype or "auto", cells, progress))
            if server:
                cells.extend(run.against(server, cells, progress))
        complete = True
    finally:  # what was measured before something went wrong took its time too
        if as_json and cells:
            found = {"bench": [cell.to_json() for cell in cells], "complete": complete}
            typer.echo(json.dumps(found | {"machine": _machine(machine)}))
        elif cells:
            bench_report.show(cells)
    if plot:
        bench_report.plot(plot, cells)


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A draft by the name it is shown with, and the pair that is served. `known`: it is ours to model."""

    name: str
    pair: Pair
    known: bool = True


@dataclass(frozen=True)
class Run:
    """What every stack of services is put through."""

    loads: list[Load]
    depths: list[Depth]
    repeats: int
    seed: int
    hardware: Hardware | None

    def of(self, system: System, chosen: Chosen, progress: Progress) -> Iterator[Cell]:
        """Cells of every load at every depth, after a warming that is not measured."""
        depths: list[Depth] = self.depths if chosen.pair.speculates or not chosen.known else [0]
        total = (1 + self.repeats * len(self.loads)) * len(depths)
        task = progress.add_task(f"{chosen.name}: warming", total=total)
        self._warm(system, depths)
        progress.advance(task, len(depths))
        for at, load in enumerate(self.loads):
            progress.update(task, description=f"{chosen.name}: {load.name}")
            runs = alternate(system, load, depths, self.repeats, self.seed + 1000 * at, lambda: progress.advance(task))
            for depth in depths:
                cell = Cell(SPIRE, chosen.name, depth, load.batch, load.context, runs[depth], runs[0], trace=load.trace)
                yield replace(cell, modelled=self._modelled(chosen, load, cell))

    def peers(
        self, target: Path, drafts: list[Path], dtype: str, cells: list[Cell], progress: Progress
    ) -> Iterator[Cell]:
        """Cells of the peers, beside our plain decoding of the same batch and context."""
        batches = [load for load in self.loads if isinstance(load, Batch)]
        depth = next((depth for depth in self.depths if depth not in (0, AUTO)), _LOOKED_UP)
        assert depth != AUTO
        task = Task(target, assistant_of(drafts), batches, dtype, depth, self.repeats, self.seed)
        row = progress.add_task(TRANSFORMERS, total=peer_cells(task))
        for cell in run_transformers(task):
            yield _beside_plain(cell, cells)
            progress.advance(row)

    def against(self, server: Server, cells: list[Cell], progress: Progress) -> Iterator[Cell]:
        """A cell of each load at another server, beside our plain decoding of the same."""
        row = progress.add_task(server.url, total=len(self.loads) * (self.repeats + 1))
        for at, load in enumerate(self.loads):
            cell = server.measure(load, self.repeats, self.seed + 1000 * at, lambda: progress.advance(row))
            yield _beside_plain(cell, cells)

    def _warm(self, system: System, depths: list[Depth]) -> None:
        """Something short, as wide as the widest load, at each depth."""
        load = self.loads[0]
        width = max(load.batch or _WARM_REQUESTS for load in self.loads)
        shortest = min(load.context or _WARM_TOKENS for load in self.loads)
        warming = Batch(load.source, width, shortest, _WARM_TOKENS, load.temperature)
        alternate(system, warming, depths, 1, self.seed - 1, lambda: None)

    def _modelled(self, chosen: Chosen, load: Load, cell: Cell) -> dict[str, Any]:
        if self.hardware is None or not chosen.known or cell.k == 0 or not isinstance(load, Batch):
            return {}
        model = Model(chosen.pair.model, chosen.pair.draft, self.hardware)
        depth = None if cell.k == AUTO else cell.k
        return model.predict(load.batch, load.context + load.generate // 2, depth, cell.figures.tau)


def _beside_plain(cell: Cell, cells: list[Cell]) -> Cell:
    same = [c.runs for c in cells if c.k == 0 and (c.batch, c.context) == (cell.batch, cell.context)]
    return cell.beside(same[-1]) if same else cell


# --- what was asked ---------------------------------------------------------------------------------------------------


def _choose(drafts: str | None, model: Path | None, url: str | None) -> list[Chosen]:
    """The stacks to start. Plain decoding is measured in each, and has one of its own only where nothing else is."""
    if url and drafts is None:
        return [Chosen("as served", choose_pair(model, OFF), known=False)]
    default = MAGICDEC if model is not None else SPIRE
    wanted = [_named(text.strip(), model) for text in (drafts or default).split(",")]
    stacks = [chosen for chosen in wanted if chosen.name != OFF] or wanted[:1]
    if url and len(stacks) > 1:
        raise typer.BadParameter("--url serves one draft: name it alone in --drafts, or none")
    return stacks


def _named(text: str, model: Path | None) -> Chosen:
    name, _, directory = text.partition("=")
    if directory:
        return Chosen(name, choose_pair(model, directory))
    if name in (OFF, MAGICDEC):
        return Chosen(name, choose_pair(model, name))
    if name == SPIRE:
        pair = choose_pair(model, None)
        if pair.draft is None:
            raise SpireError(f"the bundled draft is not {pair.model}'s: name its own with --drafts spire=DIR")
        return Chosen(name, pair)
    if name == "vanilla":
        raise SpireError("no vanilla draft is bundled: train one (spire train draft) and name it: --drafts vanilla=DIR")
    if not Path(name).is_dir():
        raise SpireError(f"--drafts {name} is no directory and none of {OFF}, {SPIRE}, {MAGICDEC}, NAME=DIR")
    return Chosen(Path(name).name, choose_pair(model, name))


def _depths(text: str) -> list[Depth]:
    depths: list[Depth] = [AUTO if part == AUTO else _numbers(part)[0] for part in text.replace(" ", "").split(",")]
    if wrong := [depth for depth in depths if depth != AUTO and not 0 <= depth <= _DEEPEST]:
        raise typer.BadParameter(f"--k {wrong[0]}: a depth is between 0 and {_DEEPEST}, or {AUTO}")
    return list(dict.fromkeys([0, *depths]))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers like 1,4,16") from error
    if min(numbers) < 0:
        raise typer.BadParameter(f"{text!r} has a number below 0")
    return numbers


def _refuse_too_long(context: int, generate: int, longest: int) -> None:
    if context + generate > longest:
        raise SpireError(
            f"{context} prompt tokens and {generate} more do not fit the target's {longest} positions: "
            "lower --context or --generate"
        )


def _calibration(file: Path | None, target: Shape, dtype: str | None) -> Calibration | None:
    """What this machine was measured to do; None where nobody measured and no file is named."""
    if file is None and not calibration.default_file().is_file():
        _note("no modelled figures: measure this machine once with 'spire doctor --calibrate'")
        return None
    found = calibration.load(file or calibration.default_file())
    if found.target != target or dtype not in (None, "auto", found.dtype):
        _note(f"modelled figures are of another target or type: the calibration is of {found.target}, {found.dtype}")
    return found


def _note(text: str) -> None:
    Console(stderr=True, highlight=False).print(f"[yellow]note:[/] {text}")


def _machine(calibrated: Calibration | None) -> dict[str, Any]:
    here = {"system": platform.platform(), "processor": platform.processor(), "cores": os.cpu_count()}
    return here | {"calibrated": asdict(calibrated.machine) if calibrated else None}


def _progress(quiet: bool) -> Progress:
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=Console(stderr=True), disable=quiet)
