"""What every service tells Prometheus of its process: memory and its limit, processor time, descriptors, version.

Files are read when Prometheus asks. What it does not know: memory of a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from spire import __version__

# What the kernel allows a container, in both of its hierarchies; "max" is no number.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class _Limits(Collector):
    def collect(self) -> Iterator[Metric]:
        help_text = "Bytes of memory that this process may come to have: its container's, or the machine's."
        yield GaugeMetricFamily("spire_memory_limit_bytes", help_text, value=memory_limit())
        yield InfoMetricFamily("spire_build", "What runs here.", value={"version": __version__})


def register_process(registry: CollectorRegistry) -> None:
    # When each counter was made: twice the series, and nobody asks.
    disable_created_metrics()
    ProcessCollector(registry=registry)
    registry.register(_Limits())


def memory_limit() -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _LIMITS:
        with suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits)
