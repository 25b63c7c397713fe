"""`spire eval`: measure a draft through the REST endpoint of real services, and the quality of a target.

    spire eval acceptance --draft runs/draft --data prose/ --context 512,1900
    spire eval acceptance --rule rejection,block,invariant
    spire eval divergence --dtype bfloat16
    spire eval target --data prose/

Without --url, services are started for the measurement and stopped after it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from spire.bench.acceptance import acceptance
from spire.bench.chats import ChatSource, ChosenChats, source_of
from spire.bench.client import Client, Completed, Request
from spire.bench.peers.divergence import divergence
from spire.bench.prompts import BUNDLED_TEXT, PromptMaker, PromptSource
from spire.cli.options import Chats, Data, Draft, Dtype, Json, Model, Seed, Temperature, Url, numbers
from spire.cli.paths import choose_pair
from spire.cli.serving import serving
from spire.cli.terminal import progress_bar
from spire.cli.up import ModelOptions

evaluate = typer.Typer(help="Measure what a draft gains.", no_args_is_help=True)

Concurrency = Annotated[int, typer.Option(help="Requests at once.", min=1)]


@evaluate.command("acceptance")
def eval_acceptance(
    url: Url = None,
    model: Model = None,
    draft: Draft = None,
    dtype: Dtype = None,
    data: Data = None,
    chats: Chats = None,
    contexts: Annotated[int, typer.Option(help="How many prompts.", min=2)] = 512,
    context: Annotated[str, typer.Option(help="Tokens of each prompt; several with commas.")] = "512",
    generate: Annotated[int, typer.Option(help="Tokens generated after each prompt.", min=8)] = 64,
    k: Annotated[int, typer.Option(help="Speculation depth.", min=1, max=16)] = 4,
    temperature: Temperature = 1.0,
    rule: Annotated[str, typer.Option(help="block, rejection or invariant; several with commas.")] = "block",
    concurrency: Concurrency = 16,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Mean tokens per round τ with its 95 % interval, and acceptance by position, through the services."""
    pair = choose_pair(model, draft)
    source: PromptMaker = source_of(pair.model, data, chats)
    requests = [Request(generate + 1, temperature, k, name.strip()) for name in rule.split(",")]
    with serving(url, pair, ModelOptions(dtype)) as served:
        if isinstance(source, ChatSource):
            source = ChosenChats(source, served.url, requests[0], concurrency)
        prompts = {length: source.cut(contexts, length, seed) for length in numbers(context)}
        cells = [
            acceptance(
                asyncio.run(_complete(served.url, cut, request, concurrency, f"context {length}")), length, request
            )
            for length, cut in prompts.items()
            for request in requests
        ]
    left_out = source.left_out if isinstance(source, ChosenChats) else None
    if as_json:
        told = {"left_out": left_out} if left_out else {}
        return typer.echo(json.dumps({"acceptance": [asdict(cell) for cell in cells]} | told))
    headings = ("context", "contexts", "k", "temperature", "rule", "rounds", "τ", "± 95 %", "prefix", "tokens/s")
    table = Table(*(Column(heading, justify="right") for heading in headings), title="τ through the services")
    for cell in cells:
        prefix = " ".join(f"{share:.2f}" for share in cell.prefix_acceptance)
        row = (cell.context, cell.contexts, cell.k, cell.temperature, cell.rule, cell.rounds)
        rate = f"{cell.tokens_per_second:.0f}"
        table.add_row(*map(str, row), f"{cell.tau:.3f}", f"{cell.tau_ci95:.3f}", prefix, rate)
    Console().print(table)
    if left_out:
        typer.echo(left_out)


@evaluate.command("divergence")
def eval_divergence(
    url: Url = None,
    model: Model = None,
    draft: Draft = None,
    dtype: Dtype = None,
    data: Data = None,
    contexts: Annotated[int, typer.Option(help="How many prompts.", min=2)] = 128,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    generate: Annotated[int, typer.Option(help="Tokens generated after each prompt.", min=8)] = 128,
    k: Annotated[int, typer.Option(help="Speculation depth.", min=1, max=16)] = 4,
    temperature: Temperature = 1.0,
    concurrency: Concurrency = 16,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """How often, under the invariant rule, speculation changes the text of a seed: never in float32.

    In bfloat16, a forward of one token more or fewer rounds differently, which can change a token if two are almost
    equally probable. Only the first difference of each text from plain decoding is counted.
    """
    pair = choose_pair(model, draft)
    prompts = PromptSource(pair.model, data or [BUNDLED_TEXT]).cut(contexts, context, seed)
    drafted, plain = (Request(generate, temperature, depth, "invariant") for depth in (k, 0))
    with serving(url, pair, ModelOptions(dtype)) as served:
        plainly, guessed, alone = (
            [one.token_ids for one in asyncio.run(_complete(served.url, prompts, request, at_once, title))]
            for request, at_once, title in (
                (plain, concurrency, "plain"),
                (drafted, concurrency, f"k = {k}"),
                (plain, 1, "plain, alone"),
            )
        )
    cells = [divergence(f"speculation, k = {k}", guessed, plainly), divergence("batch mates alone", alone, plainly)]
    if as_json:
        return typer.echo(json.dumps({"divergence": [cell.to_json() for cell in cells]}))
    table = Table("what differs", "texts", "tokens", "partings", "per 1,000 tokens", "± 95 %", title="invariant rule")
    for cell in cells:
        row = (cell.what, cell.texts, cell.tokens, cell.partings)
        table.add_row(*map(str, row), f"{cell.per_1000:.3f}", f"{cell.per_1000_ci95:.3f}")
    Console().print(table)


@evaluate.command("target")
def eval_target(
    model: Model = None,
    data: Data = None,
    windows: Annotated[int, typer.Option(help="Windows of 2,001 tokens to measure on.", min=2)] = 200,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """A target's bits per byte on held-out text, and its loss on the same tokens early and late in the context."""
    from spire.checkpoints.tokenizer import load_tokenizer
    from spire.checkpoints.weights import load_target
    from spire.training.evaluation import evaluate_target

    directory = choose_pair(model, "off").model
    prompts = PromptSource(directory, data or [BUNDLED_TEXT]).cut(windows, 2001, seed)
    with progress_bar(as_json) as progress:
        task = progress.add_task("windows", total=windows)
        target = load_target(directory)[0]
        tokenizer = load_tokenizer(directory, target.config.vocab_size)
        figures = evaluate_target(target, tokenizer, prompts, lambda: progress.advance(task))
    if as_json:
        return typer.echo(json.dumps({"target": asdict(figures)}))
    table = Table("figure", "value", title=f"{directory.name} on {figures.tokens:,} tokens")
    for name, value in asdict(figures).items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console().print(table)


async def _complete(
    url: str, prompts: list[list[int]], request: Request, concurrency: int, title: str
) -> list[Completed]:
    with progress_bar() as progress:
        task = progress.add_task(f"{title}, {request.rule}", total=len(prompts))
        async with Client(url, concurrency) as client:
            return await client.complete_all(request, prompts, lambda _: progress.advance(task))
