"""When the clients of a soak come, and what they ask."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate, cycle, islice, pairwise

from spire.bench.load import Arrival
from spire.bench.prompts import PromptSource
from tests.faults.history import Body

POOL = 24


def poisson(context: int, rng: random.Random) -> list[Arrival]:
    """Requests that come independently of each other, one a second on average; lengths of all orders of magnitude."""
    moments = accumulate(rng.expovariate(1) for _ in range(1000))
    return [Arrival(at, _length(rng, 3 * context // 4), _length(rng, context // 8)) for at in moments]


def _length(rng: random.Random, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(8), math.log(most))))


def pool(source: PromptSource, rows: list[Arrival], rng: random.Random) -> list[Body]:
    """Requests of the lengths of so many rows of a trace, greedy and sampled by turns."""
    bodies: list[Body] = []
    for number, row in enumerate(rng.sample(rows, POOL)):
        (prompt,) = source.cut(1, row.context, number)
        rule: Body = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
        always = {"max_tokens": row.generated, "ignore_eos": True, "return_token_ids": True}
        bodies.append({"prompt": prompt} | always | rule)
    return bodies


def arrivals(rows: list[Arrival], first: int, rate: float, seconds: float) -> Iterator[float]:
    """The trace's arrivals from its row `first` on, at this mean rate, from the beginning again when it ends."""
    gaps = [after.at - before.at for before, after in pairwise(rows)]
    stretch, at = len(gaps) / sum(gaps) / rate, 0.0
    for gap in islice(cycle(gaps), first, None):
        at += gap * stretch
        if at > seconds:
            return
        yield at
