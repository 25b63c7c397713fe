"""`spire eval stop`: when to stop drafting, compared on the target's own text.

spire eval stop --model smollm2 --chats gsm8k_test.jsonl --chats humaneval.jsonl --data prose/ --plot plots/
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from spire.bench.chats import ChatSource, ChosenChats
from spire.bench.client import Client, Request
from spire.bench.prediction import served_draft
from spire.bench.prompts import BUNDLED_TEXT, PromptMaker, PromptSource
from spire.cli.options import Chats, Data, Draft, Json, Model, Seed, Temperature, numbers
from spire.cli.paths import Pair, choose_pair
from spire.cli.perf.perf_options import find_hardware
from spire.cli.serving import serving
from spire.cli.up import ModelOptions
from spire.errors import SpireError
from spire.model.config import load_model_config
from spire.perf import plots
from spire.perf.perf_model import plain_cost, round_cost
from spire.perf.shapes import Shape
from spire.progress import count_shown

if TYPE_CHECKING:
    from spire.training.stopping.rules import Costs, Fronts, JudgedTexts

_CONCURRENCY = 16
# Seconds of a target pass and of a draft pass in SpecDec++, section 4: llama-2-chat of 70B and 7B.
_PAPER_TARGET, _PAPER_DRAFT = 0.112, 0.0234
# What all domains together are called.
_TOGETHER = "together"


def eval_stop(
    model: Model = None,
    draft: Draft = None,
    data: Data = None,
    chats: Chats = None,
    texts: Annotated[int, typer.Option(help="Texts of each domain.", min=8)] = 48,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 256,
    generate: Annotated[int, typer.Option(help="Tokens that the target writes after each prompt.", min=32)] = 128,
    k: Annotated[int, typer.Option(help="Greatest depth.", min=3, max=16)] = 16,
    temperature: Temperature = 1.0,
    by_block: Annotated[
        bool,
        typer.Option("--by-block", help="The target judges by the block rule, as it does for requests without a seed."),
    ] = False,
    hardware: Annotated[
        str | None, typer.Option(help="A calibration (spire doctor --calibrate): predict gains on this machine too.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at once for the predictions; several with commas.")] = "1",
    plot: Annotated[
        Path | None,
        typer.Option(help="Write each domain's fronts and the head's calibration to this directory."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Discarded draft tokens against verifications, for each rule of stopping; every file is a domain, and so are all
    of them together, to which one rule must fit.

    The target writes a text after each prompt. After every token of it the draft guesses k tokens, which the target
    judges. So fixed k, the head (SpecDec++), the draft's own confidence, the cost rule and an oracle are compared on
    the same blocks, by the rejection rule unless --by-block is given. Gains are tokens a second over the best fixed k,
    with the paper's costs and, with --hardware, with those of this machine.
    """
    pair = choose_pair(model, draft)
    if pair.draft is None:
        raise SpireError("a draft with weights of its own is needed: name one with --draft")
    if plot:
        plots.require()
    from spire.model.placement import choose_device
    from spire.training.stopping.rules import Costs, Judge, fronts, joined

    costs = [Costs.linear("paper", k, _PAPER_TARGET, _PAPER_DRAFT), *_machine(pair, hardware, batch, context, k)]
    domains = _written(pair, data or [], chats or [], Request(generate, temperature, 0), (texts, context, seed))
    judge = Judge(pair.model, pair.draft, choose_device("auto").type)
    judged: dict[str, JudgedTexts] = {}
    with count_shown("judging", texts * len(domains), "texts") as progress:
        for name, prompts, answers in domains:
            judged[name] = judge.judge(prompts, answers, k, temperature, progress.advance, seed)
    if len(judged) > 1:
        judged[_TOGETHER] = joined(list(judged.values()))
    found = [fronts(name, of_domain, temperature, costs, by_block) for name, of_domain in judged.items()]
    files = [file for one in found for file in _plotted(plot, one)] if plot else []
    if as_json:
        told = {"stop": [asdict(one) for one in found], "by_block": by_block, "costs": [asdict(one) for one in costs]}
        return typer.echo(json.dumps(told | ({"plots": [str(file) for file in files]} if plot else {})))
    for one in found:
        _show(one)
    for file in files:
        typer.echo(f"wrote {file}")


def _machine(pair: Pair, hardware: str | None, batches: str, context: int, k: int) -> list[Costs]:
    """Return the costs of rounds on a calibrated machine, by the number of requests at once."""
    if hardware is None or pair.draft is None:
        return []
    from spire.training.stopping.rules import Costs

    shape, draft = Shape.of(load_model_config(pair.model)), served_draft(pair.draft)
    machine = find_hardware(hardware, 0.0, None, shape)
    costs = []
    for batch in numbers(batches):
        plain = plain_cost(shape, batch, context, machine).seconds
        drafted = [round_cost(shape, draft, batch, context, depth, 1.0, machine).seconds for depth in range(1, k + 1)]
        costs.append(Costs(f"B = {batch}", (plain, *drafted)))
    return costs


def _written(
    pair: Pair, data: list[Path], chats: list[Path], request: Request, cut: tuple[int, int, int]
) -> list[tuple[str, list[list[int]], list[list[int]]]]:
    """Return the name, the prompts and the target's answers of each domain, written by plain decoding."""
    domains, (count, context, seed) = [], cut
    named = [(file, False) for file in data] + [(file, True) for file in chats]
    with serving(None, Pair(pair.model, None), ModelOptions()) as served:
        for file, are_chats in named or [(BUNDLED_TEXT, False)]:
            source: PromptMaker
            if are_chats:
                source = ChosenChats(ChatSource(pair.model, [file]), served.url, request, _CONCURRENCY)
            else:
                source = PromptSource(pair.model, [file])
            prompts = source.cut(count, context, seed)
            seeds = range(seed, seed + count)
            answers = asyncio.run(_answered(served.url, prompts, request, seeds))
            domains.append((file.name.split(".")[0], prompts, answers))
    return domains


async def _answered(url: str, prompts: list[list[int]], request: Request, seeds: range) -> list[list[int]]:
    with count_shown("writing", len(prompts), "texts") as progress:
        async with Client(url, _CONCURRENCY) as client:
            answers = await client.complete_all(request, prompts, lambda _: progress.advance(), seeds)
    return [one.token_ids for one in answers]


def _plotted(directory: Path, of_domain: Fronts) -> list[Path]:
    """Write a domain's pictures: its fronts, and the calibration of the head if there is one."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"stop_{of_domain.domain}.png"
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in of_domain.points:
        curves.setdefault(point.rule, []).append((point.discard_rate, point.verification_rate))
    title = _title(of_domain)
    plots.write_fronts(file, title, curves)
    files = [file]
    if of_domain.head is not None:
        files.append(directory / f"calibration_{of_domain.domain}.png")
        plots.write_calibration(files[-1], title, of_domain.head.calibration)
    return files


def _title(of_domain: Fronts) -> str:
    return f"{of_domain.domain}, temperature {of_domain.temperature:g}, {of_domain.texts} texts"


def _show(of_domain: Fronts) -> None:
    """Print the best setting of each rule by each cost, beside the best fixed k. Discarded draft tokens and verdicts
    (verifications) are for each generated token."""
    title = f"{_title(of_domain)}; gain over the best fixed k"
    headings = ("costs", "rule", "setting", "drafted", "discards", "verdicts", "gain (95 %)")
    columns = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = Table(*columns, title=title, box=None, padding=(0, 1, 0, 0))
    for costs in of_domain.best_k:
        rules = dict.fromkeys(point.rule for point in of_domain.points)
        for rule in rules:
            if rule.startswith("cost: ") and rule != f"cost: {costs}":
                continue
            own = [point for point in of_domain.points if point.rule == rule]
            best = max(own, key=lambda point: point.gains[costs][0])
            setting = f"{best.setting:g}" if rule in ("fixed", "oracle") else f"{best.setting:.2f}"
            rates = (f"{number:.2f}" for number in (best.drafted, best.discard_rate, best.verification_rate))
            gain, low, high = (f"{ratio - 1:+.1%}" for ratio in best.gains[costs])
            table.add_row(costs, rule.split(":")[0], setting, *rates, f"{gain} ({low} to {high})")
    Console().print(table)
    if of_domain.head is not None:
        aucs = f"{of_domain.head.auc:.3f}, of the draft's entropy {of_domain.head.auc_of_entropy:.3f}"
        more, from_, to = (f"{gain:+.3f}" for gain in of_domain.head.over_entropy)
        typer.echo(f"head: area under the ROC {aucs}: {more} ({from_} to {to})")
    for rule, interval in of_domain.saved.items():
        saved, least, most = (f"{share:.1%}" for share in interval)
        typer.echo(f"{rule}: {saved} fewer verifications than fixed k at equal discards ({least} to {most})")
