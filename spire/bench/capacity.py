"""Search for the capacity of a gateway in requests per second, and its behaviour at four times that rate.

*Capacity* is the highest arrival rate at which no request is refused and the 99th percentile of the time to first token
stays within a bound. Arrivals are a Poisson process: no client waits for another.

Does not know: clients that retry after a refusal.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from spire.bench.client import Request
from spire.bench.prompts import PromptSource
from spire.bench.stream import HttpRefusal, Streamed, Timed, stream_all, stream_each
from spire.bench.throughput import inter_token_ms, percentile
from spire.service.keys import authorization

# The search ends when the ratio of the lowest failing rate to the highest holding rate is at most this.
_CLOSE = 1.15
# Multiples of the first rate, which is that of sequential requests.
_SLOWEST, _FASTEST = 1 / 16, 4096.0
OVERLOAD = 4


@dataclass(frozen=True)
class Arriving:
    """A load of requests with prompts of `context` tokens, which arrive during `seconds` seconds."""

    source: PromptSource
    context: int
    request: Request
    seconds: float

    def at(self, rate: float, seed: int) -> list[Timed]:
        """Return requests with random arrival times: a Poisson process of `rate` per second, at least two requests."""
        rng, moments = random.Random(seed), [0.0]
        while (moment := moments[-1] + rng.expovariate(rate)) < self.seconds or len(moments) < 2:
            moments.append(moment)
        prompts = self.source.cut(len(moments), self.context, seed)
        return [Timed(self.request.streamed(prompt, seed + n), moments[n]) for n, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Trial:
    """Clients' measurements at one rate. `refused` counts refusals by HTTP status; a figure without data is None."""

    rate: float
    requests: int
    refused: dict[int, int]
    time_to_first_token_ms_p99: float | None
    inter_token_ms_p99: float | None
    tokens_per_second: float
    refusal_ms_p95: float | None

    def holds(self, bound_ms: float) -> bool:
        waited = self.time_to_first_token_ms_p99
        return not self.refused and waited is not None and waited <= bound_ms


@dataclass(frozen=True)
class Capacity:
    """All trials of the search, the successful trial at the highest rate, and a trial at four times that rate.

    `alone_ms` is the time to first token of a single request. No rate is tried if `alone_ms` exceeds `bound_ms`.
    """

    bound_ms: float
    alone_ms: float
    trials: list[Trial]
    best: Trial | None
    overload: Trial | None

    @property
    def stretch(self) -> float | None:
        """The 99th percentile of inter-token latency under overload, relative to that at capacity."""
        if not self.best or not self.overload or not self.overload.inter_token_ms_p99:
            return None
        return self.overload.inter_token_ms_p99 / (self.best.inter_token_ms_p99 or float("inf"))


def find(url: str, arriving: Arriving, bound_ms: float, seed: int, tell: Callable[[Trial], None]) -> Capacity:
    """Search for the capacity of the gateway at `url`, then measure four times that rate. `tell` gets each trial."""
    for prompt in arriving.source.cut(2, arriving.context, seed - 1):  # the first warms the service up
        (lone,) = asyncio.run(stream_all(url, [Timed(arriving.request.streamed(prompt, seed))], authorization()))
    alone_ms = 1000 * (lone.first - lone.sent)
    trials: list[Trial] = []

    def holds(rate: float) -> bool:
        trials.append(run(url, arriving, rate, seed + 100_000 * len(trials)))
        tell(trials[-1])
        return trials[-1].holds(bound_ms)

    if alone_ms <= bound_ms:
        search(holds, first=1 / (lone.last - lone.sent))
    best = max((one for one in trials if one.holds(bound_ms)), key=lambda one: one.rate, default=None)
    overload = None
    if best:
        overload = run(url, arriving, OVERLOAD * best.rate, seed + 100_000 * len(trials))
        tell(overload)
    return Capacity(bound_ms, alone_ms, trials, best, overload)


def search(holds: Callable[[float], bool], first: float = 1.0) -> None:
    """Search for the highest rate for which `holds(rate)` is true: double or halve from `first` on, then bisect."""
    good, bad = None, None
    rate = first
    while _SLOWEST <= rate / first <= _FASTEST:
        if holds(rate):
            good = rate
        else:
            bad = rate
        if good is None:
            rate /= 2
        elif bad is None:
            rate *= 2
        elif bad / good <= _CLOSE:
            return
        else:
            rate = (good * bad) ** 0.5


def run(url: str, arriving: Arriving, rate: float, seed: int) -> Trial:
    """Measure one arrival rate until all requests are answered. Raises BenchError for failures other than refusals."""
    outcomes = asyncio.run(stream_each(url, arriving.at(rate, seed), authorization()))
    answers = [one for one in outcomes if isinstance(one, Streamed)]
    refusals = [one for one in outcomes if isinstance(one, HttpRefusal)]
    waits = [1000 * (one.first - one.sent) for one in answers]
    gaps = inter_token_ms(answers)
    took = max(one.last for one in answers) - min(one.sent for one in answers) if answers else 1.0
    return Trial(
        rate,
        len(outcomes),
        dict(Counter(one.status for one in refusals)),
        percentile(waits, 0.99) if waits else None,
        percentile(gaps, 0.99) if gaps else None,
        sum(one.tokens for one in answers) / took,
        percentile([1000 * one.seconds for one in refusals], 0.95) if refusals else None,
    )
