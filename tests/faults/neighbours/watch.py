"""What a victim sees while others do what they do: the gaps between its tokens, and how soon /health answers.

All on threads of this process, at the services' own priority.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import httpx

from tests.faults.neighbours.stack import Gateway, Stack

HEALTH_EVERY, COUNTERS_EVERY, MEMORY_EVERY = 0.05, 0.2, 0.5
# Of the victim: longer than anything is allowed to take, so that what took too long is measured.
PATIENCE_SECONDS = 120.0
# As many as fit beside others, and long enough that few gaps are first ones.
_TOKENS = 600


@dataclass
class Seen:
    """In seconds. `failures`: what the victim was told instead of tokens, and who gave no health."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    longest_step: float = 0.0
    peak_bytes: int = 0
    peak_besides_cache: int = 0
    failures: list[str] = field(default_factory=list)

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            self.gaps + other.gaps,
            self.first_tokens + other.first_tokens,
            self.health + other.health,
            max(self.longest_step, other.longest_step),
            max(self.peak_bytes, other.peak_bytes),
            max(self.peak_besides_cache, other.peak_besides_cache),
            self.failures + other.failures,
        )


class Watch:
    """One stream after another, /health twenty times a second, the verifier's steps. Leaving waits for the stream."""

    def __init__(self, gateway: Gateway, stack: Stack | None = None):
        self.seen = Seen()
        self._gateway, self._stack = gateway, stack
        self._over = threading.Event()
        loops: list[Callable[[], None]] = [self._stream, self._ask_health]
        loops += [self._time_steps, self._weigh] if stack else []
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS + 10)

    # -- the victim ----------------------------------------------------------------------------------------------------

    def _stream(self) -> None:
        number = 0
        with httpx.Client(timeout=PATIENCE_SECONDS, trust_env=False) as client:
            while not self._over.is_set():
                number += 1
                try:
                    self._one_stream(client, number)
                except httpx.HTTPError as error:
                    self.seen.failures.append(f"the victim: {error!r}")
                    time.sleep(0.2)

    def _one_stream(self, client: httpx.Client, number: int) -> None:
        tokens = min(_TOKENS, self._gateway.max_context // 2)
        body = {"prompt": f"The old man {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        url, headers = f"{self._gateway.url}/v1/completions", self._gateway.headers
        arrivals = [time.monotonic()]
        with client.stream("POST", url, json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                self.seen.failures.append(f"the victim: {response.status_code} {response.read().decode()[:200]}")
                time.sleep(0.2)
                return
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.seen.failures.append(f"the victim: {event['error']}")
                arrivals.append(time.monotonic())
        gaps = [after - before for before, after in pairwise(arrivals)]
        self.seen.first_tokens += gaps[:1]
        self.seen.gaps += gaps[1:]

    # -- health --------------------------------------------------------------------------------------------------------

    def _ask_health(self) -> None:
        """By a new connection each time, as probes do."""
        while not self._over.wait(HEALTH_EVERY):
            began = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=PATIENCE_SECONDS)
            try:
                connection.request("GET", "/health")
                status = connection.getresponse().status
                if status != http.client.OK:
                    self.seen.failures.append(f"/health: {status}")
            except (OSError, http.client.HTTPException) as error:
                self.seen.failures.append(f"/health: {error!r}")
            finally:
                connection.close()
            self.seen.health.append(time.monotonic() - began)

    # -- the services --------------------------------------------------------------------------------------------------

    def _time_steps(self) -> None:
        """The longest mean of the steps that ended between two looks: a long step is alone there, or nearly."""
        assert self._stack
        before: dict[str, Any] | None = None
        while not self._over.wait(COUNTERS_EVERY):
            with suppress(httpx.HTTPError):
                now = self._stack.verifier_counters()
                if before:
                    self.seen.longest_step = max(self.seen.longest_step, mean_step(before, now))
                before = now

    def _weigh(self) -> None:
        assert self._stack
        while not self._over.wait(MEMORY_EVERY):
            self.seen.peak_bytes = max(self.seen.peak_bytes, sum(self._stack.resident().values()))
            self.seen.peak_besides_cache = max(self.seen.peak_besides_cache, self._stack.resident_besides_cache())


def mean_step(before: dict[str, dict[str, float]], now: dict[str, dict[str, float]]) -> float:
    """Seconds of a step between two looks at the verifier's counters. One forward may count for several kinds."""
    steps, seconds = (
        {kind: value - before[name][kind] for kind, value in now[name].items()}
        for name in ("spire_verifier_steps_total", "spire_verifier_busy_seconds_total")
    )
    return sum(seconds.values()) / max(1.0, *steps.values())
