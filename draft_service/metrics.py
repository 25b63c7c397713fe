"""Prometheus metrics of the draft service. Each scrape reads the values from the service's objects."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from draft_service.follower import Follower
from draft_service.replies import Replies
from draft_service.worker import Worker
from spire.service.process_metrics import register_process


class DraftCollector(Collector):
    def __init__(self, worker: Worker, follower: Follower, replies: Replies):
        self._worker, self._follower, self._replies = worker, follower, replies

    def collect(self) -> Iterator[Metric]:
        drafter = self._worker.drafter
        yield GaugeMetricFamily(
            "spire_draft_state_bytes_per_sequence",
            "Bytes the draft holds for one sequence, whatever its context.",
            value=drafter.memory.bytes_per_sequence(),
        )
        yield GaugeMetricFamily("spire_draft_sequences", "Sequences remembered.", value=len(drafter.slots))
        yield GaugeMetricFamily(
            "spire_draft_following",
            "1 while the stream to the verifier is open.",
            value=self._follower.following,
        )
        yield CounterMetricFamily(
            "spire_draft_busy_seconds", "Seconds the model thread worked.", value=self._worker.busy_seconds
        )
        received, sent = self._follower.bytes_received, self._replies.q_bytes
        yield _by_carrier("activation", "Bytes of activations received, by how they came.", received)
        yield _by_carrier("q", "Bytes of q sent, by how they went.", sent)
        yield self._worker.staleness.family(
            "spire_draft_staleness_positions", "Verified positions that had not arrived when a draft request did."
        )
        yield CounterMetricFamily(
            "spire_draft_subscriptions", "Subscriptions, each with a full replay.", value=self._follower.subscriptions
        )


def _by_carrier(what: str, help_text: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"spire_draft_{what}_bytes", help_text, labels=["carrier"])
    for carrier, count in counts.items():
        family.add_metric([carrier], count)
    return family


def registry_of(worker: Worker, follower: Follower, replies: Replies) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)  # so that a scrape can select metrics by name
    registry.register(DraftCollector(worker, follower, replies))
    register_process(registry)
    return registry
