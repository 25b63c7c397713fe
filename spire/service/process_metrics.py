"""Prometheus metrics of a service's process: memory and its limit, processor time, descriptors, version.

The values are read when Prometheus scrapes. Does not know: GPU memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from spire import __version__
from spire.service.machine_memory import memory_limit


class _Limits(Collector):
    def collect(self) -> Iterator[Metric]:
        help_text = "Bytes of memory that this process may come to have: its container's, or the machine's."
        yield GaugeMetricFamily("spire_memory_limit_bytes", help_text, value=memory_limit())
        yield InfoMetricFamily("spire_build", "What runs here.", value={"version": __version__})


def register_process(registry: CollectorRegistry) -> None:
    # The creation time of each counter would double the number of series, and is not used.
    disable_created_metrics()
    ProcessCollector(registry=registry)
    registry.register(_Limits())
