"""What the clients of a load see, and where the time of a round goes.

*Decode* tokens per second are those while all requests decode: from the last one's first round to the first one's end,
each request counted from its first chunk in that interval to its last. *End to end* is everything: all tokens over the
time from the first request to the last token, prefill included. An inter-token latency is the time between two chunks
over the tokens of the later one.

The counters of a round's parts are read as soon as all decode, which takes some milliseconds from the round it falls
into. That round counts in a mean round, because those counters have it, but not in the rate, unless too few are left.
It would mislead the gateway's choice of k, too: so of several runs only the first ones have their rounds split.

A batch is run twice on the same prompts: the first pass, whose prompts nobody has seen, gives the end-to-end figures;
the second, whose prefill a prefix cache saves, lets all requests decode together for most of their tokens, and gives
the others. Without a prefix cache (`cached_tokens` 0) both passes are alike.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spire.bench.stream import ROUND_CHUNK, Listener, Streamed, Timed, stream_all
from spire.bench.system import DRAFT_STATE_BYTES, FALLBACKS, ROUND_SECONDS, ROUNDS, Counters, Scrape, System
from spire.keys import FOREIGN_KEY, authorization

# The two model steps, forward and sampling. Everything else in a round is overhead, except the wait for another
# sequence's prefill, which is not the round's own and is left out of both sides.
MODEL_PARTS = {"propose", "verify_forward", "verify_sample"}
OTHERS_PREFILL = "verify_queue"
# What the parts may miss of a round, or have too much.
SPLIT_TOLERANCE = 0.05


@dataclass(frozen=True)
class Figures:
    """One run, or medians of several. None is what could not be seen: no moment with all decoding, no such metric.

    `round_ms` is a mean round by part while all decode, `round_ms_seen` the same as the clients' time between chunks;
    `overhead` the share of it outside the models. `mean_k`: draft tokens a round. `busy`: share of the time that each
    model service computed. `fallbacks`: blocks decoded plainly for want of a draft, by reason. `peak_memory_bytes`: of
    the services' processes, GPU memory not included.
    """

    requests: int
    generated: int
    cached_tokens: int
    decode_tokens_per_second: float | None
    end_to_end_tokens_per_second: float
    time_to_first_token_ms_p50: float
    time_to_first_token_ms_p99: float
    inter_token_ms_p50: float | None
    inter_token_ms_p99: float | None
    tau: float | None
    mean_k: float | None
    round_ms: dict[str, float] | None
    round_ms_seen: float | None
    busy: dict[str, float] | None
    fallbacks: dict[str, float] | None
    peak_memory_bytes: int | None
    draft_state_bytes_per_sequence: int | None
    exact_tokens: bool

    @property
    def round_total_ms(self) -> float | None:
        """Δt: the sum of a mean round's parts."""
        return sum(self.round_ms.values()) if self.round_ms else None

    @property
    def split_covers(self) -> float | None:
        """The parts' sum over the round that the clients see."""
        return self.round_total_ms / self.round_ms_seen if self.round_total_ms and self.round_ms_seen else None

    @property
    def split_adds_up(self) -> bool | None:
        return None if self.split_covers is None else abs(self.split_covers - 1) <= SPLIT_TOLERANCE

    @property
    def overhead(self) -> float | None:
        if not self.round_ms:
            return None
        own = sum(ms for part, ms in self.round_ms.items() if part != OTHERS_PREFILL)
        return 1 - sum(ms for part, ms in self.round_ms.items() if part in MODEL_PARTS) / own


@dataclass(frozen=True)
class Pass:
    """The answers to a load. `scrapes` span the time in which all decode, or the whole load where there is none; None
    where counters were not read."""

    answers: list[Streamed]
    scrapes: tuple[Scrape, Scrape] | None
    together: bool


async def measure(system: System, requests: list[Timed], together: bool = True, split: bool = True) -> Figures:
    """Run a load on a Spire gateway. `together`: all are sent at once, and the time in which all decode counts.

    `split`: read the services' counters while all decode.
    """
    system.forget_peak()
    twice = together and len(requests) > 1
    first = await _run(system, requests, together, split and not twice)
    second = await _run(system, requests, together, split) if twice else first
    return _figures(first, second, system.peak_bytes())


async def measure_foreign(url: str, requests: list[Timed], together: bool = True) -> Figures:
    """The same load at any server that streams completions: no splits, and τ only if it is Spire."""
    key = authorization(FOREIGN_KEY)
    first = Pass(await stream_all(url, requests, key), None, together)
    second = Pass(await stream_all(url, requests, key), None, together) if together and len(requests) > 1 else first
    return _figures(first, second, None)


def figures_of_steps(answers: list[Streamed], peak: int | None) -> Figures:
    """Figures of one run of something that generates in this way, however it was timed."""
    run = Pass(answers, None, together=True)
    return _figures(run, run, peak)


async def _run(system: System, requests: list[Timed], together: bool, split: bool) -> Pass:
    if together:
        return await (_run_split if split else _run_whole)(system, requests)
    before = await system.scrape()
    answers = await stream_all(system.url, requests, authorization())
    return Pass(answers, (before, await system.scrape()), together)


async def _run_whole(system: System, requests: list[Timed]) -> Pass:
    return Pass(await stream_all(system.url, requests, authorization()), None, together=True)


async def _run_split(system: System, requests: list[Timed]) -> Pass:
    listener = Listener(len(requests))
    scrapes = asyncio.gather(_scrape_when(listener.all_decode, system), _scrape_when(listener.one_ended, system))
    try:
        answers = await stream_all(system.url, requests, authorization(), listener)
        before, after = await scrapes
    finally:
        scrapes.cancel()
    return Pass(answers, (before, after), together=True)


async def _scrape_when(event: asyncio.Event, system: System) -> Scrape:
    await event.wait()
    return await system.scrape()


# --- figures of a run -------------------------------------------------------------------------------------------------


def _figures(first: Pass, second: Pass, peak: int | None) -> Figures:
    waits = [1000 * (answer.first - answer.sent) for answer in first.answers]
    tokens = sum(answer.tokens for answer in first.answers)
    latencies = inter_token_ms(second.answers)
    stretches = decoding_together(second.answers) if second.together else None
    undisturbed = None
    if stretches and second.scrapes:
        undisturbed = decoding_together(second.answers, since=second.scrapes[0].gateway.moment)
    told = [a.metrics["speculative_decoding"] for a in second.answers if "speculative_decoding" in a.metrics]
    before, after = second.scrapes or (None, None)
    counters = after.gateway.samples if after else {}
    # A split of rounds without all requests in them would be of no batch at all.
    alike = stretches is not None or not second.together
    return Figures(
        requests=len(first.answers),
        generated=tokens,
        cached_tokens=sum(_cached(answer) for answer in second.answers),
        decode_tokens_per_second=_rate(undisturbed or stretches),
        end_to_end_tokens_per_second=tokens / (max(a.last for a in first.answers) - min(a.sent for a in first.answers)),
        time_to_first_token_ms_p50=percentile(waits, 0.5),
        time_to_first_token_ms_p99=percentile(waits, 0.99),
        inter_token_ms_p50=percentile(latencies, 0.5) if latencies else None,
        inter_token_ms_p99=percentile(latencies, 0.99) if latencies else None,
        tau=_mean_of_rounds(told, "num_accepted_draft_tokens", 1.0),
        mean_k=_mean_of_rounds(told, "num_draft_tokens", 0.0),
        round_ms=_round_ms(before.gateway.samples, counters) if before and alike else None,
        round_ms_seen=_round_seen(stretches),
        busy=after.busy_since(before) or None if before and after and alike else None,
        fallbacks=_grown(FALLBACKS, before.gateway.samples, counters, "reason") if before else None,
        peak_memory_bytes=peak,
        draft_state_bytes_per_sequence=int(counters.get(DRAFT_STATE_BYTES, 0)) if after else None,
        exact_tokens=all(answer.exact for answer in (*first.answers, *second.answers)),
    )


Stretch = list[tuple[float, int]]


def decoding_together(answers: list[Streamed], since: float = 0.0) -> list[Stretch] | None:
    """Each answer's arrivals from the last one's first round to the first one's end; None where these are too few.

    `since`: from the first round that is over after that moment. Arrivals of one round come a little apart: each
    answer's own nearest to these moments are its first and its last.
    """
    firsts = [[moment for moment, _ in answer.arrivals[ROUND_CHUNK - 1 :] if moment >= since][:1] for answer in answers]
    if not all(firsts):
        return None
    begin, end = max(firsts)[0], min(answer.last for answer in answers)
    stretches = [answer.arrivals[_nearest(answer, begin) : _nearest(answer, end) + 1] for answer in answers]
    return stretches if all(len(stretch) > 1 for stretch in stretches) else None


def _nearest(answer: Streamed, moment: float) -> int:
    return min(range(len(answer.arrivals)), key=lambda at: abs(answer.arrivals[at][0] - moment))


def _rate(stretches: list[Stretch] | None) -> float | None:
    if stretches is None:
        return None
    return sum(sum(count for _, count in stretch[1:]) / (stretch[-1][0] - stretch[0][0]) for stretch in stretches)


def _round_seen(stretches: list[Stretch] | None) -> float | None:
    """Mean milliseconds between two chunks: there is one a round."""
    if stretches is None:
        return None
    return 1000 * statistics.fmean((s[-1][0] - s[0][0]) / (len(s) - 1) for s in stretches)


def inter_token_ms(answers: list[Streamed]) -> list[float]:
    """For each token after a first chunk its share of the time since the chunk before."""
    return [
        1000 * (later - earlier) / count
        for answer in answers
        for (earlier, _), (later, count) in pairwise(answer.arrivals)
        for _ in range(count)
    ]


def _cached(answer: Streamed) -> int:
    return int((answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _mean_of_rounds(told: list[dict[str, Any]], name: str, base: float) -> float | None:
    rounds = sum(figures["num_spec_steps"] for figures in told)
    known = rounds and all(name in figures for figures in told)
    return base + sum(figures[name] for figures in told) / rounds if known else None


def _round_ms(before: Counters, after: Counters) -> dict[str, float] | None:
    rounds = after[ROUNDS] - before[ROUNDS]
    seconds = _grown(ROUND_SECONDS, before, after, "part")
    return {part: 1000 * spent / rounds for part, spent in seconds.items()} if rounds else None


def _grown(name: str, before: Counters, after: Counters, label: str) -> dict[str, float]:
    """What a counter has grown by, by the value of a label, whatever its other labels are."""
    grown: dict[str, float] = defaultdict(float)
    for sample, value in after.items():
        if sample.startswith(name + "{"):
            labels = dict(pair.split("=", 1) for pair in sample[len(name) + 1 : -1].split("}{"))
            grown[labels[label]] += value - before.get(sample, 0.0)
    return dict(grown)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


# --- several runs -----------------------------------------------------------------------------------------------------


# What only a run tells whose rounds were split.
_OF_SPLIT = {"round_ms", "round_ms_seen", "busy", "fallbacks", "draft_state_bytes_per_sequence"}


def medians(runs: list[Figures]) -> Figures:
    """The median of each figure; of a mean round the mean of the runs, so that its parts still add up."""
    split = [run for run in runs if run.fallbacks is not None] or runs
    columns = {
        name: [getattr(run, name) for run in (split if name in _OF_SPLIT else runs)]
        for name in Figures.__dataclass_fields__
    }
    return Figures(**{name: _median(name, values) for name, values in columns.items()})


def _median(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], dict):
        return {key: statistics.fmean(value[key] for value in values) for key in values[0]}
    if name == "round_ms_seen":
        return statistics.fmean(values)
    return statistics.median(values)
