"""`spire capacity`: measure the highest request rate that is served in time, and the service at four times that rate.

    spire capacity                                     the bundled pair on this machine
    spire capacity --context 1900 --generate 64 --first-token 5
    spire capacity --url http://127.0.0.1:8000         services that already run, with their own options

Services started by this command refuse requests that would wait longer than the bound (option `--max-queue-seconds` of
the gateway), so that the queue does not grow under overload.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from spire.bench.capacity import OVERLOAD, Arriving, Capacity, Trial, find
from spire.bench.client import Request
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.cli.options import Data, Draft, Dtype, Json, Model, Temperature, Url
from spire.cli.paths import choose_pair
from spire.cli.serving import serving
from spire.cli.up import ModelOptions

console = Console(stderr=True, highlight=False)


def capacity(
    url: Url = None,
    model: Model = None,
    draft: Draft = None,
    first_token: Annotated[
        float, typer.Option(help="Bound in seconds for the 99th percentile of the time to the first token.", min=0.01)
    ] = 2.0,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=2)] = 512,
    generate: Annotated[int, typer.Option(help="Tokens generated after each prompt.", min=2)] = 64,
    temperature: Temperature = 1.0,
    seconds: Annotated[float, typer.Option(help="How long requests arrive at each rate.", min=1)] = 20.0,
    dtype: Dtype = None,
    data: Data = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrival times.")] = 0,
    as_json: Json = False,
) -> None:
    """Find the highest request rate that is served in time, and measure four times that rate."""
    pair = choose_pair(model, draft)
    source = PromptSource(pair.model, data or [BUNDLED_TEXT])
    arriving = Arriving(source, context, Request(generate, temperature, None), seconds)
    with serving(url, pair, ModelOptions(dtype), gateway_options=["--max-queue-seconds", str(first_token)]) as system:
        found = find(system.url, arriving, 1000 * first_token, seed, _tell)
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"overload_factor": OVERLOAD, "inter_token_stretch": found.stretch}))
    else:
        Console().print(_table(found))


def _tell(trial: Trial) -> None:
    waited = _ms(trial.time_to_first_token_ms_p99)
    refused = f", {sum(trial.refused.values())} of {trial.requests} refused" if trial.refused else ""
    console.print(f"{trial.rate:.2f} requests/s: first token within {waited} (p99){refused}", style="dim")


def _table(found: Capacity) -> Table:
    headings = ("", "requests/s", "refused", "first token p99", "between tokens p99", "tokens/s", "refusal p95")
    columns = [Column(heading, justify="right") for heading in headings]
    table = Table(*columns, title=f"capacity: first token within {found.bound_ms:.0f} ms for 99 of 100")
    for name, trial in (("capacity", found.best), (f"{OVERLOAD} × that", found.overload)):
        if trial is None:
            table.add_row(name, *["none"] * (len(columns) - 1))
            continue
        refused = f"{sum(trial.refused.values())} of {trial.requests}"
        times = (trial.time_to_first_token_ms_p99, trial.inter_token_ms_p99)
        row = [f"{trial.rate:.2f}", refused, *map(_ms, times), f"{trial.tokens_per_second:.0f}"]
        table.add_row(name, *row, _ms(trial.refusal_ms_p95))
    if found.alone_ms > found.bound_ms:
        table.caption = f"a request alone waits {_ms(found.alone_ms)} for its first token: see --first-token"
    if found.stretch:
        table.caption = f"time between tokens at {OVERLOAD} × capacity: {found.stretch:.2f} × that at capacity"
    return table


def _ms(milliseconds: float | None) -> str:
    return "none" if milliseconds is None else f"{milliseconds:.0f} ms"
