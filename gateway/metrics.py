"""What the gateway counts, and how Prometheus reads it.

Counting is plain arithmetic on one thread, so that a round costs no locks; the exposition is built when it is read.
Every figure is stored once: the `vllm:*` names that existing dashboards read are the same numbers again.

What it does not know: what the model services measure of themselves (their own metrics ports do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.depth import DEEPEST
from gateway.sequence import Sequence
from spire.histogram import Histogram

_MILLISECONDS = (2, 4, 6, 8, 10, 15, 20, 25, 30, 40, 60, 80, 100, 200, 400, 600, 800, 1000, 2000, 4000, 8000)
INTER_TOKEN_BUCKETS = tuple(milliseconds / 1000 for milliseconds in _MILLISECONDS)
FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
REQUEST_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0)
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# Where a round's time goes. `draft_wait`: for activations on their way, or for the verifier where it drafts itself;
# `verify_queue`: for the verifier's other work, prefill above all; `wire`: between asking and answer, what neither
# service counted.
ROUND_PARTS = ("propose", "verify_forward", "verify_sample", "draft_wait", "verify_queue", "wire", "gateway")
FINISH_REASONS = ("stop", "length", "abort", "error")
FALLBACKS = ("draft_absent", "draft_timeout", "draft_lost", "draft_behind", "draft_error")
# Of rounds that were to be drafted: those that were, whatever came of it, and the sampled ones that were not.
DECODINGS = ("speculative", "plain")


def parts_of_round(
    seconds: float, models: tuple[float, float, float], waited: float, queued: float, asked: float
) -> tuple[float, ...]:
    """Split a round's seconds, in the order of ROUND_PARTS.

    `models` is what the services took, by their own clocks. What else passed of `asked`, from asking to answer, is the
    wire's, the rest the gateway's. Of what is told to have been waited for, some was in the round before, where this
    one was sent ahead; so was what the models took beyond `seconds`, which counts here all the same.
    """
    left = max(0.0, seconds - sum(models))
    waited = min(waited, left)
    queued = min(queued, left - waited)
    told = sum(models) + waited + queued
    asked = max(min(asked, seconds), told)
    return (*models, waited, queued, asked - told, max(0.0, seconds - asked))


# vLLM numbers its engines; there is one verifier behind a gateway.
_ENGINE = "0"


def _zeros(names: tuple[str, ...]) -> dict[str, float]:
    return dict.fromkeys(names, 0)


@dataclass
class Gauges:
    """What is true now, asked when Prometheus reads."""

    running: int = 0
    starting: int = 0
    waiting: int = 0
    # Share of the verifier's cache.
    cache_usage: float = 0.0
    # Most draft tokens of a block, by the handshakes: how many series there are.
    deepest: int = 0
    # Of the event loop: what grows when something is not cleaned up.
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
    # By peer: for how long it is left alone after an answer that came too late.
    circuits: dict[str, float] = field(default_factory=dict)
    # Of automatic rounds: what is chosen now, and what is expected of it.
    k: int = 0
    tau: float = 1.0
    # None where no plain rounds are run to compare with.
    multiplier: float | None = 1.0
    # None without a calibrated machine.
    multiplier_modelled: float | None = None
    # By service; empty where none are configured.
    prices: dict[str, float] = field(default_factory=dict)


@dataclass
class Metrics:
    """The gateway's counters. `now` of every method is seconds of one monotonic clock."""

    # Rounds may be under way in so many lanes at once.
    lanes: int = 1
    rounds: int = 0
    # By lane.
    round_seconds: list[dict[str, float]] = field(init=False)
    round_duration: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BUCKETS))
    compared_rounds: dict[str, float] = field(default_factory=lambda: _zeros(DECODINGS))
    compared_tokens: dict[str, float] = field(default_factory=lambda: _zeros(DECODINGS))
    compared_seconds: dict[str, float] = field(default_factory=lambda: _zeros(DECODINGS))
    # Rounds by the draft tokens of their deepest block.
    rounds_at: list[int] = field(default_factory=lambda: [0] * (DEEPEST + 1))
    batch_size: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    # Sequences' rounds that carried draft tokens, and what became of them.
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    # Of those, what became output: not what lay behind the end of a text.
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

    def __post_init__(self) -> None:
        self.round_seconds = [_zeros(ROUND_PARTS) for _ in range(self.lanes)]

    def round(self, lane: int, seconds: tuple[float, ...], sequences: int, k: int) -> None:
        """One round: its seconds in the order of ROUND_PARTS, the draft tokens of its deepest block."""
        self.rounds += 1
        self.rounds_at.extend([0] * (k + 1 - len(self.rounds_at)))
        self.rounds_at[k] += 1
        by_part = self.round_seconds[lane]
        for part, spent in zip(ROUND_PARTS, seconds, strict=True):
            by_part[part] += spent
        self.round_duration.observe(sum(seconds))
        self.batch_size.observe(sequences)

    def compared(self, decoding: str, tokens: int, seconds: float) -> None:
        """A round that was to be drafted, and was or was not; `tokens` are those that became output."""
        self.compared_rounds[decoding] += 1
        self.compared_tokens[decoding] += tokens
        self.compared_seconds[decoding] += seconds

    def drafted_block(self, drafted: int, accepted: int, kept: int) -> None:
        """`kept`: how many of the block's tokens became output, of the accepted ones and the target's own."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_output += min(accepted, kept)
        if drafted > len(self.accepted_at):
            self.accepted_at.extend([0] * (drafted - len(self.accepted_at)))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def token_times(self, sequence: Sequence, tokens: int, now: float) -> None:
        """Stamp new tokens of a sequence: those of one round share the time since the one before."""
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
        """Have a series for each from the beginning: one that comes with its first response hides it from `rate`."""
        self.responses = {(path, str(status)): 0 for path, status in product(paths, statuses)}

    def response(self, path: str, status: int) -> None:
        key = (path, str(status))
        self.responses[key] = self.responses.get(key, 0) + 1


class Exposition(Collector):
    """Builds the families anew at every scrape."""

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
        """What speculation is worth: against rounds that were left plain, by the performance model, in money."""
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
        parts = CounterMetricFamily("spire_round_seconds", "Seconds of rounds, by part.", labels=["lane", "part"])
        for lane, by_part in enumerate(counts.round_seconds):
            for part, seconds in by_part.items():
                parts.add_metric([str(lane), part], seconds)
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
    """Of all families those that have a sample of one of these names: writing the others takes time from rounds.

    A registry's own restriction knows no family that was not there when it was made, as prices or a multiplier.
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
    """The same family with these labels on every sample, before its own."""
    family.samples = [sample._replace(labels=labels | sample.labels) for sample in family.samples]
    return family


def _positions(name: str, help_text: str, counts: Metrics, now: Gauges) -> Metric:
    return _labelled(name, help_text, "position", _numbered(counts.accepted_at, now.deepest))


def _numbered(counts: list[int], at_least: int) -> dict[str, float]:
    """By place, as many as there may come to be: no request makes a series."""
    return {str(at): float(n) for at, n in enumerate(counts + [0] * (at_least - len(counts)))}
