"""`spire eval`: what a draft and a target give, the draft's part through the REST endpoint of the real services.

    spire eval acceptance --draft runs/draft --data prose/ --context 512,1900
    spire eval target --data prose/

Without --url the services are started for the measurement and stopped after it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from spire.bench.acceptance import Acceptance, acceptance
from spire.bench.client import Client, Request
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.cli.paths import choose_pair
from spire.cli.serving import serving
from spire.cli.up import ModelOptions

evaluate = typer.Typer(help="Measure what a draft gives.", no_args_is_help=True)

Url = Annotated[str | None, typer.Option(help="A gateway that runs already. Default: services are started.")]
Model = Annotated[Path | None, typer.Option(help="The target; its tokenizer cuts prompts. Default: the bundled one.")]
Draft = Annotated[
    str | None,
    typer.Option(help="Draft directory, 'magicdec' or 'off'. Default: the bundled target's draft."),
]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")]
Data = Annotated[
    list[Path] | None, typer.Option(help="Text files or directories to cut prompts from; repeatable. Default: bundled.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0)]
Seed = Annotated[int, typer.Option(help="Decides where prompts are cut.")]


@evaluate.command("acceptance")
def eval_acceptance(
    url: Url = None,
    model: Model = None,
    draft: Draft = None,
    dtype: Dtype = None,
    data: Data = None,
    contexts: Annotated[int, typer.Option(help="How many prompts.", min=2)] = 512,
    context: Annotated[str, typer.Option(help="Tokens of each prompt; several with commas.")] = "512",
    generate: Annotated[int, typer.Option(help="Tokens generated after each prompt.", min=8)] = 64,
    k: Annotated[int, typer.Option(help="Speculation depth.", min=1, max=16)] = 4,
    temperature: Temperature = 1.0,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 16,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Mean tokens per round τ with its 95 % interval, and acceptance by position, through the services."""
    pair = choose_pair(model, draft)
    source = PromptSource(pair.model, data or [BUNDLED_TEXT])
    request = Request(max_tokens=generate + 1, temperature=temperature, k=k)
    prompts = {length: source.cut(contexts, length, seed) for length in _numbers(context)}
    with serving(url, pair, ModelOptions(dtype, None, None)) as served:
        cells = [asyncio.run(_acceptance(served.url, cut, request, k, concurrency, n)) for n, cut in prompts.items()]
    if as_json:
        typer.echo(json.dumps({"acceptance": [cell.to_json() for cell in cells]}))
    else:
        Console().print(_acceptance_table(cells))


@evaluate.command("target")
def eval_target(
    model: Model = None,
    data: Data = None,
    windows: Annotated[int, typer.Option(help="Windows of 2,001 tokens to measure on.", min=2)] = 200,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """A target's bits per byte on held-out text, and its loss on the same tokens early and late in the context."""
    from tokenizers import Tokenizer

    from spire.model.checkpoint import load_target
    from spire.training.evaluation import evaluate_target

    directory = choose_pair(model, "off").model
    prompts = PromptSource(directory, data or [BUNDLED_TEXT]).cut(windows, 2001, seed)
    with _progress(as_json) as progress:
        task = progress.add_task("windows", total=windows)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        figures = evaluate_target(load_target(directory)[0], tokenizer, prompts, lambda: progress.advance(task))
    if as_json:
        typer.echo(json.dumps({"target": figures.to_json()}))
        return
    table = Table("figure", "value", title=f"{directory.name} on {figures.tokens:,} tokens")
    for name, value in figures.to_json().items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console().print(table)


async def _acceptance(
    url: str, prompts: list[list[int]], request: Request, k: int, concurrency: int, context: int
) -> Acceptance:
    with _progress(False) as progress:
        task = progress.add_task(f"context {context}", total=len(prompts))
        async with Client(url, concurrency) as client:
            completions = await client.complete_all(request, prompts, lambda _: progress.advance(task))
    return acceptance(completions, context, k, request.temperature)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers like 1,4,16") from error


def _progress(quiet: bool) -> Progress:
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def _acceptance_table(cells: list[Acceptance]) -> Table:
    table = Table(title="τ through the services")
    for heading in ("context", "contexts", "k", "temperature", "rounds", "τ", "± 95 %", "prefix accepted"):
        table.add_column(heading, justify="right")
    for cell in cells:
        prefix = " ".join(f"{share:.2f}" for share in cell.prefix_acceptance)
        row = (cell.context, cell.contexts, cell.k, cell.temperature, cell.rounds)
        table.add_row(*map(str, row), f"{cell.tau:.3f}", f"{cell.tau_ci95:.3f}", prefix)
    return table
