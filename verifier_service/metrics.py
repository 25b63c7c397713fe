"""What the verifier counts, in Prometheus' names. One registry per service, so that tests can run several."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class VerifierMetrics:
    """`kind` is `verify`, `prefill`, or `draft` where the target drafts for itself."""

    def __init__(self, slots: int, cache_bytes: int):
        self.registry = CollectorRegistry()
        self.steps = self._counter("steps", "Forwards of the target.", ["kind"])
        self.positions = self._counter("positions", "Positions fed to the target, padding excluded.", ["kind"])
        self.tokens = self._counter("tokens", "Tokens generated.")
        self.draft_tokens = self._counter("draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._counter("accepted_tokens", "Draft tokens accepted.")
        self.busy_seconds = self._counter("busy_seconds", "Time in the target's forward and in sampling.", ["kind"])
        self.refused = self._counter("refused_items", "Items answered with an error.", ["code"])
        self.activation_bytes = self._counter("activation_bytes", "Activations published.")
        self.replays = self._counter("replays", "Replays of a sequence's sink and window.")
        self.expired = self._counter("expired_sequences", "Sequences freed because their gateway stayed away.")
        self.preempted = self._counter("preempted_sequences", "Sequences sent away because memory ran out.")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt positions copied from another sequence.")
        self.cache_held_bytes = self._gauge("cache_held_bytes", "Bytes of the cache promised to sequences.")
        self.slots_used = self._gauge("slots_used", "Sequences held.")
        self._gauge("slots", "Sequences that can be held.").set(slots)
        self._gauge("cache_bytes", "Bytes that the target's cache may come to hold.").set(cache_bytes)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"spire_verifier_{name}", text, labels or [], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"spire_verifier_{name}", text, registry=self.registry)
