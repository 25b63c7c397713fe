"""Prometheus metrics of a service's process: memory and its limit, processor time, descriptors, version.

The values are read when Prometheus scrapes. Does not know: GPU memory.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector, disable_created_metrics

from spire import __version__
from spire.service.machine_memory import memory_limit


def register_process(registry: CollectorRegistry) -> None:
    # The creation time of each counter would double the number of series, and is not used.
    disable_created_metrics()
    ProcessCollector(registry=registry)
    limit_help = "Bytes of memory that this process may come to have: its container's, or the machine's."
    Gauge("spire_memory_limit_bytes", limit_help, registry=registry).set_function(memory_limit)
    Info("spire_build", "What runs here.", registry=registry).info({"version": __version__})
