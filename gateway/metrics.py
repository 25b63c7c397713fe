"""The gateway's counters and their exposition to Prometheus.

Counting is plain arithmetic on one thread, so that a round needs no locks; the exposition is built at each scrape.
Every number is stored once: the `vllm:*` names, which existing dashboards read, show the same numbers.

Does not know: the metrics of the model services, which have metrics ports of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.sequence import DEEPEST, Sequence
from spire.service.histogram import Histogram

_MILLISECONDS = (2, 4, 6, 8, 10, 15, 20, 25, 30, 40, 60, 80, 100, 200, 400, 600, 800, 1000, 2000, 4000, 8000)
INTER_TOKEN_BUCKETS = tuple(milliseconds / 1000 for milliseconds in _MILLISECONDS)
FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0)
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# The parts of a round's seconds. `draft_wait`: waiting for activations, or for the verifier if the target drafts for
# itself; `verify_queue`: waiting for the verifier's other work, mostly prefill; `wire`: the time between request and
# answer that neither service counted.
ROUND_PARTS = ("propose", "verify_forward", "verify_sample", "draft_wait", "verify_queue", "wire", "gateway")
FINISH_REASONS = ("stop", "length", "abort", "error")
FALLBACKS = ("draft_absent", "draft_timeout", "draft_lost", "draft_behind", "draft_error")
# Rounds that were to be drafted: those for which the draft was asked, and those left plain for comparison.
DECODINGS = ("speculative", "plain")


def parts_of_round(
    seconds: float, models: tuple[float, float, float], waited: float, queued: float, asked: float
) -> tuple[float, ...]:
    """Split the seconds of a round into its parts, in the order of ROUND_PARTS.

    `models`: seconds to propose, verify and sample, by the services' clocks; `waited` and `queued`: seconds of
    draft_wait and verify_queue; `asked`: seconds from request to answer. The rest of `asked` is the wire's, the rest of
    `seconds` the gateway's. A round sent ahead began during the round before: waiting that exceeds `seconds` is left
    out, but the time of the models is counted in full.
    """
    left = max(0.0, seconds - sum(models))
    waited = min(waited, left)
    queued = min(queued, left - waited)
    told = sum(models) + waited + queued
    asked = max(min(asked, seconds), told)
    return (*models, waited, queued, asked - told, max(0.0, seconds - asked))


# The `engine` label of vLLM's metrics; a gateway has one verifier.
_ENGINE = "0"


def _zeros(names: tuple[str, ...]) -> dict[str, float]:
    return dict.fromkeys(names, 0)


@dataclass
class Gauges:
    """The current state of the gateway, read at each scrape."""

    running: int = 0
    starting: int = 0
    waiting: int = 0
    # Share of the verifier's cache that live sequences hold.
    cache_usage: float = 0.0
    # The most draft tokens of a block, by the handshakes; the number of series by position follows.
    deepest: int = 0
    # Tasks of the event loop: their number grows when something is not cleaned up.
    tasks: int = 0
    verifier_up: bool = False
    # None where no draft is configured.
    draft_up: bool | None = None
    # Empty until a verifier has been met.
    model_name: str = ""
    # Empty until a draft has been met.
    draft_kind: str = ""
    draft_name: str = ""
    draft_state_bytes: int = 0
    # Seconds that each peer is left alone after a late answer; 0 if it is not.
    circuits: dict[str, float] = field(default_factory=dict)
    # The k chosen last for automatic sequences, and the tokens expected of a round at that k.
    k: int = 0
    tau: float = 1.0
    # None if there are no plain rounds to compare with.
    multiplier: float | None = 1.0
    # None without a calibrated machine.
    multiplier_modelled: float | None = None
    # The price of an hour by service; empty if none is configured.
    prices: dict[str, float] = field(default_factory=dict)


@dataclass
class Metrics:
    """The gateway's counters. `now` is in seconds of the monotonic clock in every method."""

    rounds: int = 0
    round_seconds: dict[str, float] = field(default_factory=lambda: _zeros(ROUND_PARTS))
    round_duration: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    compared_rounds: dict[str, float] = field(default_factory=lambda: _zeros(DECODINGS))
    compared_tokens: dict[str, float] = field(default_factory=lambda: _zeros(DECODINGS))
    compared_seconds: dict[str, float] = field(default_factory=lambda: _zeros(DECODINGS))
    # Rounds by the draft tokens of their deepest block.
    rounds_at: list[int] = field(default_factory=lambda: [0] * (DEEPEST + 1))
    batch_size: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    # Blocks with draft tokens, and the draft tokens drafted and accepted.
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    # Accepted draft tokens that became output: none behind the end of a text.
    drafted_output: int = 0
    accepted_at: list[int] = field(default_factory=list)
    fallbacks: dict[str, float] = field(default_factory=lambda: _zeros(FALLBACKS))
    replays: int = 0
    gave_way: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, float] = field(default_factory=lambda: _zeros(FINISH_REASONS))
    responses: dict[tuple[str, str], int] = field(default_factory=dict)
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    request_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))

    def round(self, seconds: tuple[float, ...], sequences: int, k: int) -> None:
        """Count a round: `seconds` in the order of ROUND_PARTS, `k` draft tokens in the deepest block."""
        self.rounds += 1
        self.rounds_at.extend([0] * (k + 1 - len(self.rounds_at)))
        self.rounds_at[k] += 1
        for part, spent in zip(ROUND_PARTS, seconds, strict=True):
            self.round_seconds[part] += spent
        self.round_duration.observe(sum(seconds))
        self.batch_size.observe(sequences)

    def compared(self, decoding: str, tokens: int, seconds: float) -> None:
        """Count a round that was to be drafted, by its `decoding` of DECODINGS; `tokens` became output."""
        self.compared_rounds[decoding] += 1
        self.compared_tokens[decoding] += tokens
        self.compared_seconds[decoding] += seconds

    def drafted_block(self, drafted: int, accepted: int, kept: int) -> None:
        """Count a block with draft tokens. `kept`: the tokens that became output, accepted or the target's own."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_output += min(accepted, kept)
        if drafted > len(self.accepted_at):
            self.accepted_at.extend([0] * (drafted - len(self.accepted_at)))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def token_times(self, sequence: Sequence, tokens: int, now: float) -> None:
        """Record times between tokens: the time since the sequence's last token, split evenly over its new ones."""
        moments = sequence.moments
        self.generated_tokens += tokens
        if moments.first_token:
            self.inter_token.observe((now - moments.last_token) / tokens, tokens)
        else:
            moments.first_token = now
            self.first_token.observe(now - moments.arrived)
            self.prompt_tokens += len(sequence.prompt)
        moments.last_token = now

    def sequence_finished(self, sequence: Sequence, now: float) -> None:
        moments = sequence.moments
        moments.finished = now
        self.finished[sequence.finish_reason or "error"] += 1
        self.request_time.observe(now - moments.arrived)
        if len(sequence.output) > 1:
            self.per_output_token.observe((moments.last_token - moments.first_token) / (len(sequence.output) - 1))

    def expect_responses(self, paths: Iterable[str], statuses: Iterable[int]) -> None:
        """Begin a series at 0 for every path and status: `rate` misses the response that creates a series."""
        self.responses = {(path, str(status)): 0 for path, status in product(paths, statuses)}

    def response(self, path: str, status: int) -> None:
        key = (path, str(status))
        self.responses[key] = self.responses.get(key, 0) + 1


class Exposition(Collector):
    """A Prometheus collector that builds its metric families anew at every scrape."""

    def __init__(self, metrics: Metrics, gauges: Callable[[], Gauges], vllm_names: bool):
        self.metrics, self.gauges, self.vllm_names = metrics, gauges, vllm_names

    def collect(self) -> Iterator[Metric]:
        now = self.gauges()
        yield from self._requests(now)
        yield from self._speculation(now)
        yield from self._comparison(now)
        yield from self._rounds()
        yield from self._peers(now)
        if self.vllm_names and now.model_name:
            labels = {"model_name": now.model_name, "engine": _ENGINE}
            yield from (_with_labels(family, labels) for family in self._vllm(now))

    def _requests(self, now: Gauges) -> Iterator[Metric]:
        counts = self.metrics
        responses = CounterMetricFamily("spire_http_responses", "HTTP responses.", labels=["path", "status"])
        for (path, status), count in sorted(counts.responses.items()):
            responses.add_metric([path, status], count)
        yield responses
        yield _labelled("spire_sequences", "Choices that ended, by how.", "finished_reason", counts.finished)
        yield _counter("spire_prompt_tokens", "Prompt tokens prefilled.", counts.prompt_tokens)
        yield _counter("spire_generated_tokens", "Tokens generated.", counts.generated_tokens)
        yield counts.first_token.family("spire_time_to_first_token_seconds", "Arrival to first token.")
        yield counts.inter_token.family("spire_inter_token_latency_seconds", "Seconds per token after the first.")
        yield counts.request_time.family("spire_request_seconds", "Arrival to last token of a choice.")
        yield counts.queue_time.family("spire_queue_seconds", "Arrival to admission.")
        sequences = GaugeMetricFamily("spire_sequences_now", "Choices in the gateway, by state.", labels=["state"])
        for state in ("waiting", "starting", "running"):
            sequences.add_metric([state], getattr(now, state))
        yield sequences
        yield GaugeMetricFamily("spire_tasks_now", "Tasks of the gateway's event loop.", value=now.tasks)

    def _speculation(self, now: Gauges) -> Iterator[Metric]:
        counts = self.metrics
        yield _counter("spire_drafts", "Blocks of draft tokens verified.", counts.drafts)
        yield _counter("spire_draft_tokens", "Draft tokens verified.", counts.drafted)
        yield _counter("spire_accepted_tokens", "Draft tokens accepted.", counts.accepted)
        yield _counter("spire_drafted_output_tokens", "Draft tokens that became output.", counts.drafted_output)
        help_text = "Blocks whose draft token at this position was accepted."
        yield _positions("spire_accepted_tokens_at", help_text, counts, now)
        yield _labelled("spire_fallbacks", "Blocks decoded plainly for want of a draft.", "reason", counts.fallbacks)
        at = _numbered(counts.rounds_at, now.deepest + 1)
        yield _labelled("spire_rounds_at_depth", "Rounds, by the draft tokens of the deepest block.", "k", at)
        yield GaugeMetricFamily("spire_speculation_depth", "k chosen last for automatic requests.", value=now.k)
        yield GaugeMetricFamily("spire_tau", "Tokens of a round expected at that k.", value=now.tau)
        if now.multiplier is not None:
            help_text = "Tokens a second at that k over those of plain decoding, from rounds of both."
            yield GaugeMetricFamily("spire_multiplier_measured", help_text, value=now.multiplier)

    def _comparison(self, now: Gauges) -> Iterator[Metric]:
        """Yield the worth of speculation: compared with rounds left plain, by the performance model, and in money."""
        counts, label = self.metrics, "decoding"
        yield _labelled("spire_compared_rounds", "Rounds that were to be drafted.", label, counts.compared_rounds)
        yield _labelled("spire_compared_tokens", "Tokens that those rounds gave.", label, counts.compared_tokens)
        yield _labelled("spire_compared_seconds", "Seconds of those rounds.", label, counts.compared_seconds)
        if now.multiplier_modelled is not None:
            help_text = "What the performance model says of the rounds that are run, on the calibrated machine."
            yield GaugeMetricFamily("spire_multiplier_modelled", help_text, value=now.multiplier_modelled)
        if now.prices:
            prices = GaugeMetricFamily("spire_price_per_hour", "As configured, of all its devices.", labels=["service"])
            for service, price in now.prices.items():
                prices.add_metric([service], price)
            yield prices

    def _rounds(self) -> Iterator[Metric]:
        counts = self.metrics
        yield _counter("spire_rounds", "Rounds.", counts.rounds)
        parts = CounterMetricFamily("spire_round_seconds", "Seconds of rounds, by part.", labels=["part"])
        for part, seconds in counts.round_seconds.items():
            parts.add_metric([part], seconds)
        yield parts
        yield counts.round_duration.family("spire_round_duration_seconds", "Seconds of a round.")
        yield counts.batch_size.family("spire_round_sequences", "Sequences in a round.")
        yield _counter("spire_replays", "Sequences started again after they were lost.", counts.replays)
        yield _counter("spire_gave_way", "Sequences beyond their share that others took the place of.", counts.gave_way)

    def _peers(self, now: Gauges) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "spire_peer_up", "Whether a model service answers, and says that it serves.", labels=["peer"]
        )
        up.add_metric(["verifier"], float(now.verifier_up))
        if now.draft_up is not None:
            up.add_metric(["draft"], float(now.draft_up))
        yield up
        help_text = "How long a peer whose answer came too late is left alone; 0: it is not."
        circuits = GaugeMetricFamily("spire_circuit_seconds", help_text, labels=["peer"])
        for peer, seconds in now.circuits.items():
            circuits.add_metric([peer], seconds)
        yield circuits
        if now.draft_kind:
            who = {"kind": now.draft_kind, "name": now.draft_name}
            yield InfoMetricFamily("spire_draft", "The draft that was met last.", value=who)
        help_text = "Bytes the draft holds for one sequence, whatever its context."
        yield GaugeMetricFamily("spire_draft_state_bytes_per_sequence", help_text, value=now.draft_state_bytes)

    def _vllm(self, now: Gauges) -> Iterator[Metric]:
        counts = self.metrics
        yield GaugeMetricFamily("vllm:num_requests_running", "As vLLM.", value=now.running + now.starting)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "As vLLM.", value=now.waiting)
        help_text = "Share of the verifier's cache that live sequences have, as it said last."
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", help_text, value=now.cache_usage)
        yield _counter("vllm:prompt_tokens", "As vLLM.", counts.prompt_tokens)
        yield _counter("vllm:generation_tokens", "As vLLM.", counts.generated_tokens)
        yield _labelled("vllm:request_success", "As vLLM.", "finished_reason", counts.finished)
        yield counts.first_token.family("vllm:time_to_first_token_seconds", "As vLLM.")
        yield counts.inter_token.family("vllm:inter_token_latency_seconds", "As vLLM.")
        yield counts.per_output_token.family("vllm:request_time_per_output_token_seconds", "As vLLM.")
        yield counts.request_time.family("vllm:e2e_request_latency_seconds", "As vLLM.")
        yield counts.queue_time.family("vllm:request_queue_time_seconds", "As vLLM.")
        yield _counter("vllm:spec_decode_num_drafts", "As vLLM.", counts.drafts)
        yield _counter("vllm:spec_decode_num_draft_tokens", "As vLLM.", counts.drafted)
        yield _counter("vllm:spec_decode_num_accepted_tokens", "As vLLM.", counts.accepted)
        yield _positions("vllm:spec_decode_num_accepted_tokens_per_pos", "As vLLM.", counts, now)


@dataclass(frozen=True)
class Named(Collector):
    """The families that have a sample of one of these names: writing the others would take time from rounds.

    A registry's own restriction misses families that come later than it, such as prices or a multiplier.
    """

    all: Collector
    names: frozenset[str]

    def collect(self) -> Iterator[Metric]:
        for family in self.all.collect():
            if any(sample.name in self.names for sample in family.samples):
                yield family


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _labelled(name: str, help_text: str, label: str, values: dict[str, float]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _with_labels(family: Metric, labels: dict[str, str]) -> Metric:
    """Put these labels on every sample of the family, before the sample's own."""
    family.samples = [sample._replace(labels=labels | sample.labels) for sample in family.samples]
    return family


def _positions(name: str, help_text: str, counts: Metrics, now: Gauges) -> Metric:
    return _labelled(name, help_text, "position", _numbered(counts.accepted_at, now.deepest))


def _numbered(counts: list[int], at_least: int) -> dict[str, float]:
    """The counts by index, filled with zeros up to `at_least` entries: no request creates a series."""
    return {str(at): float(n) for at, n in enumerate(counts + [0] * (at_least - len(counts)))}
