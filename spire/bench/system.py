"""The system under measurement: a gateway and, if `spire bench` started them, the services behind the gateway.

Does not know: GPU memory, and processes on another machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from spire.bench.client import BenchError
from spire.bench.exchange import Exchange, body_of, connect, request_to
from spire.service.keys import authorization

BUSY = {"verifier": "spire_verifier_busy_seconds_total", "draft": "spire_draft_busy_seconds_total"}
ROUND_SECONDS, ROUNDS, FALLBACKS = "spire_round_seconds_total", "spire_rounds_total", "spire_fallbacks_total"
DRAFT_STATE_BYTES = "spire_draft_state_bytes_per_sequence"
# A page is requested while all sequences decode: only these samples, because writing more would slow a round down.
_ASKED = urlencode([("name[]", name) for name in (ROUND_SECONDS, ROUNDS, FALLBACKS, DRAFT_STATE_BYTES, *BUSY.values())])
_PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class Page:
    """The /metrics page of a service, fetched during a load but parsed only after it."""

    address: str
    exchange: Exchange

    @property
    def moment(self) -> float:
        return self.exchange.pieces[-1][0]

    @cached_property
    def samples(self) -> list[Sample]:
        """All metric samples on the page."""
        text = b"".join(data for _, data in body_of(self.address, self.exchange)).decode()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str) -> float:
        """Return the sum of all samples of the metric `name`."""
        return sum(sample.value for sample in self.samples if sample.name == name)

    def by(self, label: str, name: str) -> dict[str, float]:
        """Return the samples of the metric `name`, by the value of their only label, `label`."""
        return {sample.labels[label]: sample.value for sample in self.samples if sample.name == name}


# Pages fetched at one moment, by service: gateway, verifier, draft.
Scrape = dict[str, Page]


@dataclass(frozen=True)
class System:
    """A gateway, with process ids and /metrics addresses by service; both are empty if only the URL is known."""

    url: str
    processes: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)

    async def scrape(self) -> Scrape:
        """Fetch the /metrics pages of all services, over new connections: earlier ones may have been closed meanwhile.

        Raises BenchError if a service does not answer.
        """
        addresses = {"gateway": f"{self.url}/metrics"} | self.metrics
        return dict(zip(addresses, await asyncio.gather(*map(_page, addresses.values())), strict=True))

    def forget_peak(self) -> None:
        """Reset the services' peaks of resident memory to the current use, if the operating system allows that."""
        for process in self.processes.values():
            try:
                Path(f"/proc/{process}/clear_refs").write_text("5")  # Linux: resets the peak
            except OSError:
                return


def peak_of(processes: Iterable[int]) -> int | None:
    """Return the sum of processes' peaks of resident memory in bytes; None if unknown or without a process.

    The sum is an upper bound: peaks may occur at different times, and shared memory counts in each process.
    """
    try:
        lines = [line for process in processes for line in Path(f"/proc/{process}/status").read_text().splitlines()]
    except OSError:
        return None
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return sum(peaks) if peaks else None


async def _page(address: str) -> Page:
    exchange = await connect(address, Exchange)
    try:
        exchange.send(request_to(f"{address}?{_ASKED}", authorization()))
        await exchange.finish(_PATIENCE_SECONDS)
    except TimeoutError as error:
        raise BenchError(f"{address} did not answer in {_PATIENCE_SECONDS} s") from error
    finally:
        exchange.close()
    if not exchange.pieces:
        raise BenchError(f"{address} ended the connection without an answer")
    return Page(address, exchange)
