"""Loads of the benchmark, a batch sent at once or a recorded trace, and their runs at alternating depths.

A trace is a CSV like the Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens, one row per request.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from spire.bench.cell import AUTO, Depth
from spire.bench.client import Request
from spire.bench.prompts import PromptMaker
from spire.bench.stream import Timed
from spire.bench.system import System
from spire.bench.throughput import Figures, measure
from spire.errors import DataError
from spire.text.documents import decoded
from spire.text.text_files import open_unpacked

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

Body = Callable[[Request, list[int], int], dict[str, Any]]


@dataclass(frozen=True)
class Batch:
    """A load of `batch` simultaneous requests, each with `context` prompt tokens and `generate` generated tokens."""

    source: PromptMaker
    batch: int
    context: int
    generate: int
    temperature: float
    trace: None = None
    together = True

    @property
    def name(self) -> str:
        return f"{self.batch} × {self.context} tokens"

    def requests(self, k: int | None, seed: int, body: Body = Request.streamed) -> list[Timed]:
        """Return the requests of one run. Prompts and request seeds depend on `seed` only, so depths are comparable.

        Cache salts differ by depth and prompts by seed: runs share no cached prompt across depths or seeds.
        """
        request = Request(self.generate, self.temperature, k, cache_salt=_salt(k))
        prompts = self.source.cut(self.batch, self.context, seed)
        return [Timed(body(request, prompt, seed + at)) for at, prompt in enumerate(prompts)]


class Arrival(NamedTuple):
    """A request of a trace: arrival in seconds after the first request, numbers of prompt and of generated tokens."""

    at: float
    context: int
    generated: int


@dataclass(frozen=True)
class Trace:
    """A load with the arrival times, prompt lengths and output lengths of a trace."""

    source: PromptMaker
    arrivals: list[Arrival]
    temperature: float
    name: str
    batch: None = None
    context: None = None
    together = False

    @property
    def trace(self) -> str:
        return self.name

    def requests(self, k: int | None, seed: int, body: Body = Request.streamed) -> list[Timed]:
        return [
            Timed(body(Request(one.generated, self.temperature, k, cache_salt=_salt(k)), prompt, seed + at), one.at)
            for at, one in enumerate(self.arrivals)
            for prompt in self.source.cut(1, one.context, seed + at)
        ]


Load = Batch | Trace


def _salt(k: int | None) -> str:
    return AUTO if k is None else f"k = {k}"


def alternate(
    system: System,
    load: Load,
    depths: Sequence[Depth],
    repeats: int,
    seed: int,
    done: Callable[[], None],
    split_turns: int = 3,
) -> dict[Depth, list[Figures]]:
    """Run a load `repeats` times at each depth. Each turn runs all depths; the depth that comes first alternates.

    In a turn all depths get the same prompts and seeds. The first `split_turns` turns split round times into parts.
    """
    runs: dict[Depth, list[Figures]] = {depth: [] for depth in depths}
    for repeat in range(repeats):
        first = repeat % len(depths)
        for depth in [*depths[first:], *depths[:first]]:
            requests = load.requests(None if depth == AUTO else depth, seed + 1_000_000 * repeat)
            runs[depth].append(asyncio.run(measure(system, requests, load.together, repeat < split_turns)))
            done()
    return runs


def read_trace(file: Path, max_context: int, seconds: float, rate: float) -> list[Arrival]:
    """Read the first `seconds` of a trace replayed at `rate` times its speed, all lengths scaled to fit `max_context`.

    The file may be compressed. Raises DataError naming the file, and the line of an invalid request.
    """
    with open_unpacked(file) as stream:
        lines = csv.DictReader(decoded(line, str(file), number) for number, line in enumerate(stream, 1))
        rows = [_arrival(row, f"{file}, line {lines.line_num}") for row in lines]
    if not rows:
        raise DataError(f"{file} holds no request")
    scale = min(1.0, max_context / max(row.context + row.generated for row in rows))
    began = rows[0].at
    return [
        # At least two tokens each: a start token and a text token; two generated tokens for one inter-token latency.
        Arrival((row.at - began) / rate, max(2, int(row.context * scale)), max(2, int(row.generated * scale)))
        for row in rows
        if (row.at - began) / rate <= seconds
    ]


def _arrival(row: dict[str, str], where: str) -> Arrival:
    if missing := [name for name in _COLUMNS if row.get(name) is None]:
        raise DataError(f"{where}: no {missing[0]}. A trace is a CSV with the columns {', '.join(_COLUMNS)}")
    moment, context, generated = (row[name] for name in _COLUMNS)
    try:
        arrival = Arrival(datetime.fromisoformat(moment).timestamp(), int(context), int(generated))
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if arrival.context < 1 or arrival.generated < 0:
        raise DataError(f"{where}: {context} tokens of context and {generated} generated are none of a request")
    return arrival
