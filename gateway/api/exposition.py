"""The Prometheus metrics at /metrics: the gateway's counters, and its state at the time of the scrape.

Every number is stored once: the `vllm:*` names, which existing dashboards query, export the same numbers.
Does not know: the metrics of the model services, which have metrics ports of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily as Counter, GaugeMetricFamily as Gauge, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.rounds.engine import Engine


class Exposition(Collector):
    """A Prometheus collector that builds its metric families anew at every scrape."""

    def __init__(self, engine: Engine):
        self._engine, self._counts = engine, engine.metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._speculation()
        yield from self._comparison()
        yield from self._rounds()
        yield from self._peers()
        model = self._engine.verifier.model
        if self._engine.config.vllm_metrics and model:
            labels = {"model_name": model.name, "engine": "0"}  # vLLM numbers its engines: a gateway has one verifier
            for family in self._vllm():
                family.samples = [sample._replace(labels=labels | sample.labels) for sample in family.samples]
                yield family

    def _states(self) -> dict[str, float]:
        """Return the number of choices in each state. A choice without room at the verifier counts as waiting."""
        scheduler = self._engine.scheduler
        stalled = len(scheduler.stalled)
        waiting, starting = len(scheduler.waiting) + stalled, len(scheduler.starting) - stalled
        return {"waiting": waiting, "starting": starting, "running": len(scheduler.running)}

    def _requests(self) -> Iterator[Metric]:
        counts = self._counts
        responses = Counter("spire_http_responses", "HTTP responses.", labels=["path", "status"])
        for (path, status), count in sorted(counts.responses.items()):
            responses.add_metric([path, status], count)
        yield responses
        yield _labelled("spire_sequences", "Choices that ended, by how.", "finished_reason", counts.finished)
        yield Counter("spire_prompt_tokens", "Prompt tokens prefilled.", counts.prompt_tokens)
        yield Counter("spire_generated_tokens", "Tokens generated.", counts.generated_tokens)
        yield counts.first_token.family("spire_time_to_first_token_seconds", "Arrival to first token.")
        yield counts.inter_token.family("spire_inter_token_latency_seconds", "Seconds per token after the first.")
        yield counts.request_time.family("spire_request_seconds", "Arrival to last token of a choice.")
        yield counts.queue_time.family("spire_queue_seconds", "Arrival to admission.")
        yield _labelled("spire_sequences_now", "Choices in the gateway, by state.", "state", self._states(), Gauge)
        # A number of tasks that keeps growing reveals a leak.
        yield Gauge("spire_tasks_now", "Tasks of the gateway's event loop.", len(asyncio.all_tasks()))

    def _speculation(self) -> Iterator[Metric]:
        counts, drafting = self._counts, self._engine.drafting
        yield Counter("spire_drafts", "Blocks of draft tokens verified.", counts.drafts)
        yield Counter("spire_draft_tokens", "Draft tokens verified.", counts.drafted)
        yield Counter("spire_accepted_tokens", "Draft tokens accepted.", counts.accepted)
        yield Counter("spire_drafted_output_tokens", "Draft tokens that became output.", counts.drafted_output)
        drafted, accepted = counts.drafted_at, counts.accepted_at
        yield self._positions("spire_draft_tokens_at", "Blocks with a draft token at this position.", drafted)
        help_text = "Blocks whose draft token at this position was accepted."
        yield self._positions("spire_accepted_tokens_at", help_text, accepted)
        yield _labelled("spire_fallbacks", "Blocks decoded plainly for want of a draft.", "reason", counts.fallbacks)
        at = _numbered(counts.rounds_at, self._engine.deepest + 1)
        yield _labelled("spire_rounds_at_depth", "Rounds, by the draft tokens of the deepest block.", "k", at)
        yield Gauge("spire_speculation_depth", "k chosen last for automatic requests.", drafting.k)
        yield Gauge("spire_tau", "Tokens of a round expected at that k.", drafting.tau)
        if (multiplier := drafting.multiplier) is not None:
            help_text = "Tokens a second at that k over those of plain decoding, from rounds of both."
            yield Gauge("spire_multiplier_measured", help_text, multiplier)

    def _comparison(self) -> Iterator[Metric]:
        """Yield metrics of the benefit of speculation: comparison with plain rounds, predicted speedup, and prices."""
        counts, config, label = self._counts, self._engine.config, "decoding"
        yield _labelled("spire_compared_rounds", "Rounds that were to be drafted.", label, counts.compared_rounds)
        yield _labelled("spire_compared_tokens", "Tokens that those rounds gave.", label, counts.compared_tokens)
        yield _labelled("spire_compared_seconds", "Seconds of those rounds.", label, counts.compared_seconds)
        if (modelled := self._engine.drafting.multiplier_modelled) is not None:
            help_text = "What the performance model says of the rounds that are run, on the calibrated machine."
            yield Gauge("spire_multiplier_modelled", help_text, modelled)
        if config.price is not None:
            prices = {"verifier": config.price, "draft": config.draft_price}
            yield _labelled("spire_price_per_hour", "As configured, of all its devices.", "service", prices, Gauge)

    def _rounds(self) -> Iterator[Metric]:
        counts = self._counts
        yield Counter("spire_rounds", "Rounds.", counts.rounds)
        yield _labelled("spire_round_seconds", "Seconds of rounds, by part.", "part", counts.round_seconds)
        yield counts.round_duration.family("spire_round_duration_seconds", "Seconds of a round.")
        yield counts.batch_size.family("spire_round_sequences", "Sequences in a round.")
        yield Counter("spire_replays", "Sequences started again after they were lost.", counts.replays)
        help_text = "Sequences beyond their share that others took the place of."
        yield Counter("spire_gave_way", help_text, self._engine.scheduler.gave_way)

    def _peers(self) -> Iterator[Metric]:
        verifier, draft, info = self._engine.verifier, self._engine.draft, self._engine.draft_info
        up, left_alone = {"verifier": float(verifier.usable)}, {"verifier": verifier.circuit.seconds}
        if draft is not None:
            up["draft"], left_alone["draft"] = float(draft.up), draft.circuit.seconds
        yield _labelled("spire_peer_up", "Whether a model service answers, and says that it serves.", "peer", up, Gauge)
        help_text = "How long a peer whose answer came too late is left alone; 0: it is not."
        yield _labelled("spire_circuit_seconds", help_text, "peer", left_alone, Gauge)
        if info:
            who = {"kind": info.kind, "name": info.model_name}
            yield InfoMetricFamily("spire_draft", "The draft that was met last.", who)
        help_text = "Bytes the draft holds for one sequence, whatever its context."
        state_bytes = info.state_bytes_per_sequence if info else 0
        yield Gauge("spire_draft_state_bytes_per_sequence", help_text, state_bytes)

    def _vllm(self) -> Iterator[Metric]:
        counts, now = self._counts, self._states()
        running = now["running"] + now["starting"]
        yield Gauge("vllm:num_requests_running", "As vLLM.", running)
        yield Gauge("vllm:num_requests_waiting", "As vLLM.", now["waiting"])
        help_text = "Share of the verifier's cache that live sequences have, as it said last."
        yield Gauge("vllm:kv_cache_usage_perc", help_text, self._engine.verifier.cache_usage)
        yield Counter("vllm:prompt_tokens", "As vLLM.", counts.prompt_tokens)
        yield Counter("vllm:generation_tokens", "As vLLM.", counts.generated_tokens)
        yield _labelled("vllm:request_success", "As vLLM.", "finished_reason", counts.finished)
        yield counts.first_token.family("vllm:time_to_first_token_seconds", "As vLLM.")
        yield counts.inter_token.family("vllm:inter_token_latency_seconds", "As vLLM.")
        yield counts.per_output_token.family("vllm:request_time_per_output_token_seconds", "As vLLM.")
        yield counts.request_time.family("vllm:e2e_request_latency_seconds", "As vLLM.")
        yield counts.queue_time.family("vllm:request_queue_time_seconds", "As vLLM.")
        yield Counter("vllm:spec_decode_num_drafts", "As vLLM.", counts.drafts)
        yield Counter("vllm:spec_decode_num_draft_tokens", "As vLLM.", counts.drafted)
        yield Counter("vllm:spec_decode_num_accepted_tokens", "As vLLM.", counts.accepted)
        yield self._positions("vllm:spec_decode_num_accepted_tokens_per_pos", "As vLLM.", counts.accepted_at)

    def _positions(self, name: str, help_text: str, counted: list[int]) -> Metric:
        return _labelled(name, help_text, "position", _numbered(counted, self._engine.deepest))


@dataclass(frozen=True)
class Named(Collector):
    """Collects only metric families that have a sample with one of `names`: encoding the others would delay rounds.

    The registry's own `restricted_registry` misses families that appear after registration, such as a multiplier.
    """

    all: Collector
    names: frozenset[str]

    def collect(self) -> Iterator[Metric]:
        for family in self.all.collect():
            if any(sample.name in self.names for sample in family.samples):
                yield family


def _labelled(
    name: str, help_text: str, label: str, values: Mapping[str, float], kind: type[Counter | Gauge] = Counter
) -> Metric:
    family = kind(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _numbered(counts: list[int], at_least: int) -> dict[str, float]:
    """Return counts by index, padded with zeros to `at_least` entries, so that no request creates a new series."""
    return {str(at): float(n) for at, n in enumerate(counts + [0] * (at_least - len(counts)))}
