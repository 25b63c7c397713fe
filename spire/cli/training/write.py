"""`spire write`: have a served model write chats for training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spire.errors import SpireError

if TYPE_CHECKING:
    from spire.training.writing import Written


def write(
    out: Annotated[Path, typer.Option(help="File of chats (.jsonl) to write; a file that exists is continued.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts: .jsonl with `messages`, `prompt` or `question`, or .txt with one a line; repeatable. "
            "Default: the model writes them itself."
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(help="Prompts to answer in all, earlier runs included. Default: all.", min=1)
    ] = None,
    url: Annotated[str, typer.Option(help="Where the gateway listens.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(help="Answers at a time.", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer; a longer one is cut off.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="Temperature of prompts and answers.", min=0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of all prompts and answers.", min=0)] = 0,
    begin: Annotated[str, typer.Option(help="How the prompts begin that the model writes itself.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Write chats for `spire train draft` with the model that a gateway serves.

    The model answers prompts from files or, without any, prompts that it writes itself. Repeated prompts are left out.

    Example: spire write --prompts questions.jsonl --out chats.jsonl
    """
    from spire.text.prompts import read_prompts
    from spire.text.text_files import find_files
    from spire.training.writing import Writing, write_chats

    if prompts and begin:
        raise SpireError("--begin is for prompts that the model writes: leave it out, or --prompts")
    if not prompts and count is None:
        raise SpireError("how many chats shall the model write? Say --count, or give --prompts for it to answer")
    found = list(read_prompts(find_files(prompts, "--prompts"))) if prompts else None
    total = count if found is None else min(count or len(found), len(found))
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    figures = TextColumn("{task.fields[figures]}")
    with Progress(*columns, figures, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("", total=total, figures="")

        def told(written: Written) -> None:
            seconds = progress.tasks[task].elapsed or 1.0
            shown = f"{written.tokens / seconds:,.0f} tokens/s"
            progress.update(task, completed=written.prompts, figures=shown)

        writing = Writing(url.rstrip("/"), concurrency, max_tokens, temperature, seed, begin)
        try:
            done = write_chats(out, found, count, writing, told)
        except* SpireError as errors:
            raise errors.exceptions[0] from None
    if as_json:
        typer.echo(json.dumps(asdict(done) | {"out": str(out)}))
        return
    cut_off = f"{done.cut_off:,} answers cut off by --max-tokens"
    typer.echo(f"wrote {done.chats:,} chats to {out} ({done.tokens:,} tokens generated, {cut_off})")
    left_out = f"{done.known:,} repeated, {done.refused:,} refused, {done.in_circles:,} with answers in circles"
    typer.echo(f"left out of {done.prompts:,} prompts: {left_out}")
