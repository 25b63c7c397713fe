"""Figures of a load as its clients see them, and the parts of a round's time.

*Decode* tokens per second are measured while all requests decode: from the latest first round of a request to the
earliest end of a request, each request counted from its first to its last chunk in that interval. *End to end* tokens
per second are all tokens over the time from the first request to the last token, prefill included. An inter-token
latency is the time between two chunks divided by the tokens of the later chunk.

The counters of a round's parts are read as soon as all requests decode, which slows the current round down. The round
slowed by this reading counts in the mean round, but not in the decode rate, unless too few rounds are left. Because the
reading also misleads the gateway's choice of k, rounds are split into parts in the first few runs only.

A batch is run twice on the same prompts. The first pass, with prompts unknown to any cache, gives the end-to-end
figures. The second pass skips prefill through the prefix cache, so that all requests decode together for most of their
tokens, and gives the other figures. Without a prefix cache (`cached_tokens` 0) both passes are alike.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spire.bench.stream import ROUND_CHUNK, LoadListener, Streamed, Timed, stream_all
from spire.bench.system import BUSY, DRAFT_STATE_BYTES, FALLBACKS, ROUND_SECONDS, ROUNDS, Page, Scrape, System, peak_of
from spire.service.keys import FOREIGN_KEY, authorization

# Parts of a round spent in the models. All other parts are overhead, except the wait for another sequence's prefill:
# this part does not belong to the round and is left out of numerator and denominator.
MODEL_PARTS = {"propose", "verify_forward", "verify_sample"}
OTHERS_PREFILL = "verify_queue"
# Allowed relative difference between the sum of the parts and the round that the clients see.
SPLIT_TOLERANCE = 0.05


@dataclass(frozen=True)
class Figures:
    """Figures of one run, or medians. A figure is None if requests never all decoded at once or its metric is missing.

    `round_ms`: mean time of each part of a round while all requests decode; `round_ms_seen`: the whole round, as time
    between a client's chunks; `overhead`: share of a round outside the models. `mean_k`: draft tokens per round.
    `busy`: share of the time in which each model service computed. `fallbacks`: blocks decoded plainly for lack of a
    draft reply, by reason. `peak_memory_bytes`: memory of the services' processes, without GPU memory.
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
        """The sum of the parts of a mean round, in milliseconds."""
        return sum(self.round_ms.values()) if self.round_ms else None

    @property
    def split_covers(self) -> float | None:
        """The sum of a round's parts relative to the round time that the clients see."""
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


# Metrics at the beginning and the end of the time in which all requests decode or, for a trace, of the load.
Span = tuple[Scrape, Scrape] | None


async def measure(system: System, requests: list[Timed], together: bool = True, split: bool = True) -> Figures:
    """Measure a load on a Spire gateway. `together`: all requests are sent at once, and rates count while all decode.

    `split`: read the services' counters while all requests decode.
    """
    system.forget_peak()
    twice = together and len(requests) > 1
    first, span = await _run(system, requests, together, split and not twice)
    second, span = await _run(system, requests, together, split) if twice else (first, span)
    return _figures(first, second, span, together, peak_of(system.processes.values()))


async def measure_foreign(url: str, requests: list[Timed], together: bool = True) -> Figures:
    """Measure a load on any server that streams completions: no parts of a round, and τ only if the server sends it."""
    key = authorization(FOREIGN_KEY)
    first = await stream_all(url, requests, key)
    second = await stream_all(url, requests, key) if together and len(requests) > 1 else first
    return _figures(first, second, None, together, None)


def figures_of_steps(answers: list[Streamed], peak: int | None) -> Figures:
    """Compute the figures of one run from timed answers that began at the same time, for example of a peer process."""
    return _figures(answers, answers, None, True, peak)


async def _run(system: System, requests: list[Timed], together: bool, split: bool) -> tuple[list[Streamed], Span]:
    url, key, listener = system.url, authorization(), LoadListener(len(requests))
    if not together:
        before = await system.scrape()
        answers = await stream_all(url, requests, key)
        return answers, (before, await system.scrape())
    if not split:
        return await stream_all(url, requests, key), None
    scrapes = asyncio.gather(_scrape_when(listener.all_decode, system), _scrape_when(listener.one_ended, system))
    try:
        answers = await stream_all(url, requests, key, listener)
        before, after = await scrapes
    finally:
        scrapes.cancel()
    return answers, (before, after)


async def _scrape_when(event: asyncio.Event, system: System) -> Scrape:
    await event.wait()
    return await system.scrape()


def _figures(first: list[Streamed], second: list[Streamed], span: Span, together: bool, peak: int | None) -> Figures:
    waits = [1000 * (answer.first - answer.sent) for answer in first]
    tokens = sum(answer.tokens for answer in first)
    latencies = inter_token_ms(second)
    before, after = span or (None, None)
    stretches = decoding_together(second) if together else None
    undisturbed = decoding_together(second, since=before["gateway"].moment) if stretches and before else None
    prompts = [answer.usage.get("prompt_tokens_details") or {} for answer in second]
    told = [a.metrics["speculative_decoding"] for a in second if "speculative_decoding" in a.metrics]
    # Parts of rounds without all requests would belong to no particular batch size.
    alike = stretches is not None or not together
    return Figures(
        requests=len(first),
        generated=tokens,
        cached_tokens=sum(each.get("cached_tokens") or 0 for each in prompts),
        decode_tokens_per_second=_rate(undisturbed or stretches),
        end_to_end_tokens_per_second=tokens / (max(a.last for a in first) - min(a.sent for a in first)),
        time_to_first_token_ms_p50=percentile(waits, 0.5),
        time_to_first_token_ms_p99=percentile(waits, 0.99),
        inter_token_ms_p50=percentile(latencies, 0.5) if latencies else None,
        inter_token_ms_p99=percentile(latencies, 0.99) if latencies else None,
        tau=_mean_of_rounds(told, "num_accepted_draft_tokens", 1.0),
        mean_k=_mean_of_rounds(told, "num_draft_tokens", 0.0),
        round_ms=_round_ms(before["gateway"], after["gateway"]) if before and after and alike else None,
        round_ms_seen=_round_seen(stretches),
        busy=_busy(before, after) or None if before and after and alike else None,
        fallbacks=_grown(FALLBACKS, "reason", before["gateway"], after["gateway"]) if before and after else None,
        peak_memory_bytes=peak,
        draft_state_bytes_per_sequence=int(after["gateway"].total(DRAFT_STATE_BYTES)) if after else None,
        exact_tokens=all(answer.exact for answer in (*first, *second)),
    )


Stretch = list[tuple[float, int]]


def decoding_together(answers: list[Streamed], since: float = 0.0) -> list[Stretch] | None:
    """Return the chunk arrivals of each answer while all answers decode; None if an answer has fewer than two arrivals.

    The interval is from the latest first round (after `since`) to the earliest end of an answer. Arrivals of one round
    differ slightly in time, so each answer begins and ends with its arrivals nearest to the ends of the interval.
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
    """Return the mean milliseconds of a round as clients see it: a round sends one chunk. None if unknown."""
    if stretches is None:
        return None
    return 1000 * statistics.fmean((s[-1][0] - s[0][0]) / (len(s) - 1) for s in stretches)


def inter_token_ms(answers: list[Streamed]) -> list[float]:
    """Return the latency in ms of each token after the first chunk: its chunk's delay / the tokens of its chunk."""
    return [
        1000 * (later - earlier) / count
        for answer in answers
        for (earlier, _), (later, count) in pairwise(answer.arrivals)
        for _ in range(count)
    ]


def _mean_of_rounds(told: list[dict[str, Any]], name: str, base: float) -> float | None:
    rounds = sum(figures["num_spec_steps"] for figures in told)
    known = rounds and all(name in figures for figures in told)
    return base + sum(figures[name] for figures in told) / rounds if known else None


def _round_ms(before: Page, after: Page) -> dict[str, float] | None:
    rounds = after.total(ROUNDS) - before.total(ROUNDS)
    seconds = _grown(ROUND_SECONDS, "part", before, after)
    return {part: 1000 * spent / rounds for part, spent in seconds.items()} if rounds else None


def _busy(before: Scrape, after: Scrape) -> dict[str, float]:
    """Return, for each model service, the share of the time between two scrapes in which it computed."""
    spent = {name: after[name].total(BUSY[name]) - before[name].total(BUSY[name]) for name in BUSY if name in after}
    return {name: seconds / (after[name].moment - before[name].moment) for name, seconds in spent.items()}


def _grown(name: str, label: str, before: Page, after: Page) -> dict[str, float]:
    """Return the increase of the counter `name` between two pages, for each value of its label."""
    earlier = before.by(label, name)
    return {value: count - earlier.get(value, 0.0) for value, count in after.by(label, name).items()}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


# Fields that only runs with split rounds have.
_OF_SPLIT = {"round_ms", "round_ms_seen", "busy", "fallbacks", "draft_state_bytes_per_sequence"}


def medians(runs: list[Figures]) -> Figures:
    """Return the median of each figure over `runs`; of a round's time and parts the mean, so that the parts add up."""
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
