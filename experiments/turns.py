"""The speed of two states of this repository, measured by turns, so that a noisy machine is noisy to both.

    git worktree add --detach ../before COMMIT
    (cd ../before && python -c 'from setuptools import setup; setup()' build_ext --inplace)  # its own kernels
    python -m experiments.turns ../before . --context 1900 --k 0,auto --pairs 60
    python -m experiments.turns ../before . --model DIR --draft off --batch 4 --context 200 --k 0

`spire up` of both directories runs all the time, with this Python. A pair is one batch of the same requests to each, in
random order; prompts are in the prefix caches from the second batch on. The ratio of a pair is after / before in tokens
a second, from the first token of a batch to its last. Printed are medians, and 95 % intervals by bootstrap. Choose the
number of pairs beforehand: who repeats until a bound holds has not shown it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spire.address import bind
from spire.bench.client import Request
from spire.bench.prompts import BUNDLED_TEXT, PromptSource
from spire.bench.stream import Timed, stream_all
from spire.cli.paths import BUNDLED

PATIENCE_SECONDS = 600
_RESAMPLED = 4000
# Batches that fill the prefix caches and let the choice of k settle.
_WARMING = 2
_SHOWN_LINES = 5
_FIND = """
import importlib.util, json
names = "spire", "gateway", "verifier_service", "draft_service", "spire.kernels.compiled"
print(json.dumps({name: getattr(importlib.util.find_spec(name), "origin", "") for name in names}))
"""

console = Console(stderr=True)


def main(
    before: Annotated[Path, typer.Argument(help="Directory of the state to compare with.")],
    after: Annotated[Path, typer.Argument(help="Directory of the state to judge.")],
    model: Annotated[Path | None, typer.Option(help="Target of both. Default: each one's bundled pair.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft of such a target: a directory, magicdec or off.")] = None,
    batch: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 16,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=2)] = 1900,
    generate: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 40,
    k: Annotated[
        str, typer.Option(help="Depths with commas: 0 is plain decoding, auto the gateway's choice.")
    ] = "0,auto",
    pairs: Annotated[int, typer.Option(help="Pairs of each depth.", min=3)] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rates and ratios as JSON.")] = False,
) -> None:
    """Measure both by turns and print the ratio of their speeds."""
    source = PromptSource(model or BUNDLED / "target", [BUNDLED_TEXT])
    prompts = source.cut(batch, context, seed=1)
    options = [*(["--model", str(model.resolve())] if model else []), *(["--draft", _placed(draft)] if draft else [])]
    depths = {name: None if name == "auto" else int(name) for name in k.split(",")}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in depths}
    with ExitStack() as stacks:
        urls = [stacks.enter_context(serving(directory.resolve(), options)) for directory in (before, after)]
        turns = range(-_WARMING, pairs)
        for turn in track(turns, description="pairs", console=console):
            for name, depth in depths.items():
                pair = one_pair(urls, Request(generate, k=depth), prompts, seed=1000 * (turn + _WARMING))
                if turn >= 0:
                    rates[name].append(pair)
    figures = {name: summary(found) for name, found in rates.items()}
    if as_json:
        print(json.dumps({"batch": batch, "context": context, "generate": generate, "k": figures}))
        return
    table = Table("k", "before", "after", "ratio", "95 %", title=f"{batch} x {context} tokens, {pairs} pairs, tokens/s")
    for name, one in figures.items():
        low, high = one["interval"]
        cells = (f"{one['before']:,.0f}", f"{one['after']:,.0f}", f"{one['ratio']:.3f}", f"{low:.3f} to {high:.3f}")
        table.add_row(name, *cells)
    Console().print(table)


def _placed(draft: str) -> str:
    """Return the full path of a draft's directory; `magicdec` and `off` as they are."""
    return str(Path(draft).resolve()) if Path(draft).is_dir() else draft


@contextmanager
def serving(directory: Path, options: Sequence[str]) -> Iterator[str]:
    """Run `spire up` of a directory and yield the gateway's URL once it serves."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPIRE_")}
    environment |= {"PYTHONPATH": str(directory), "SPIRE_VERIFIER_METRICS_PORT": str(_free_port())}
    environment["SPIRE_DRAFT_METRICS_PORT"] = str(_free_port())
    check_own(directory, environment)
    port = _free_port()
    command = [sys.executable, "-m", "spire.cli", "up", "--port", str(port), "--prompt", "", *options]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_ready(url, process):
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
                raise typer.BadParameter(f"spire up in {directory} does not serve:\n" + "\n".join(lines))
            yield url
        finally:
            process.terminate()
            process.wait()


def check_own(directory: Path, environment: dict[str, str]) -> None:
    """Raise BadParameter unless Python finds all packages of the product, and their kernels, in `directory`."""
    found = subprocess.run(
        [sys.executable, "-c", _FIND], cwd=directory, env=environment, capture_output=True, text=True
    )
    for name, file in json.loads(found.stdout or "{}").items() or [("spire", found.stderr[-200:])]:
        if not file.startswith(f"{directory}/"):
            raise typer.BadParameter(f"{directory} has no {name} of its own (found: {file or 'none'})")


def _free_port() -> int:
    with bind("127.0.0.1", 0) as bound:
        return int(bound.getsockname()[1])


def _is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready", timeout=5, trust_env=False).is_success:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return False


def one_pair(urls: Sequence[str], request: Request, prompts: list[list[int]], seed: int) -> tuple[float, float]:
    """Return the tokens a second of both, for the same requests."""
    rate = {url: _rate(url, request, prompts, seed) for url in random.sample(urls, len(urls))}
    return rate[urls[0]], rate[urls[1]]


def _rate(url: str, request: Request, prompts: list[list[int]], seed: int) -> float:
    requests = [Timed(request.streamed(prompt, seed + at)) for at, prompt in enumerate(prompts)]
    answers = asyncio.run(stream_all(url, requests))
    seconds = max(answer.last for answer in answers) - min(answer.first for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds


def summary(rates: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return medians, and the median ratio after / before of the pairs with its 95 % interval."""
    ratios = [after / before for before, after in rates]
    chance = random.Random(1)
    resampled = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLED))
    return {
        "before": statistics.median(before for before, _ in rates),
        "after": statistics.median(after for _, after in rates),
        "ratio": statistics.median(ratios),
        "interval": (resampled[_RESAMPLED // 40], resampled[-_RESAMPLED // 40 - 1]),
        "rates": rates,
    }


if __name__ == "__main__":
    typer.run(main)
