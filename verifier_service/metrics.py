"""Prometheus metrics of the verifier. One registry per service, so that tests can run several services.

Every label value exists from the start: a series that begins with its first event hides that event from `rate`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from spire.model.cache.target_cache import TargetCache
from spire.rpc.errors import code_name
from spire.service.process_metrics import register_process
from spire.v1 import tensor_pb2

_KINDS = ("verify", "prefill", "draft")
# Carriers of draft requests; internal: the target drafts for itself.
GRPC, INTERNAL = "grpc", "internal"
_CODES = [code_name(code) for code in tensor_pb2.Code.values() if code > tensor_pb2.CODE_OK]


class VerifierMetrics:
    """Counters and gauges. The label `kind` is `verify`, `prefill`, or `draft` if the target drafts for itself."""

    def __init__(self, slots: int, cache: TargetCache):
        self.registry = CollectorRegistry()
        register_process(self.registry)
        self.steps = self._counter("steps", "Forwards of the target.", "kind", _KINDS)
        self.positions = self._counter("positions", "Positions fed to the target, padding excluded.", "kind", _KINDS)
        self.tokens = self._counter("tokens", "Tokens generated.")
        self.draft_tokens = self._counter("draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._counter("accepted_tokens", "Draft tokens accepted.")
        self.busy_seconds = self._counter(
            "busy_seconds", "Time in the target's forward and in sampling.", "kind", _KINDS
        )
        self.refused = self._counter("refused_items", "Items answered with an error.", "code", _CODES)
        self.activation_bytes = self._counter("activation_bytes", "Activations published.")
        self.replays = self._counter("replays", "Replays of a sequence's sink and window.")
        self.expired = self._counter("expired_sequences", "Sequences freed because their gateway stayed away.")
        self.preempted = self._counter("preempted_sequences", "Sequences sent away because memory ran out.")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt positions copied from another sequence.")
        self.rounds = self._counter("rounds", "Batches of gateways, by what carried them.", "carrier", (GRPC,))
        self.draft_requests = self._counter(
            "draft_requests", "Requests to drafts, by what carried them.", "carrier", (GRPC, INTERNAL)
        )
        self.slots_used = self._gauge("slots_used", "Sequences held.")
        self._gauge("slots", "Sequences that can be held.").set(slots)
        self._gauge("cache_bytes", "Bytes that the target's cache may come to hold.").set(cache.bytes)
        held = self._gauge("cache_held_bytes", "Bytes of the cache that are in memory, also where nobody is any more.")
        held.set_function(lambda: cache.held_bytes)
        live = self._gauge("cache_live_bytes", "Bytes of the cache that live sequences have: the rest gives way.")
        live.set_function(lambda: cache.live_bytes)
        parked = self._gauge("cache_parked_bytes", "Bytes of the cache kept for later prompts: half of it at most.")
        parked.set_function(lambda: cache.parked_bytes)

    def step(self, kind: str, positions: int, seconds: float) -> None:
        """Count one forward of this kind, or the part of this kind in a shared forward."""
        self.steps.labels(kind).inc()
        self.positions.labels(kind).inc(positions)
        self.busy_seconds.labels(kind).inc(seconds)

    def _counter(self, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
        counter = Counter(f"spire_verifier_{name}", text, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"spire_verifier_{name}", text, registry=self.registry)
