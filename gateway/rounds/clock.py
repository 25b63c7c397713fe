"""Measures the duration of each round, by the gateway's clock and by the verifier's clock.

A pure data structure: callers pass every `now`. Does not know: what a round consists of.
"""

from __future__ import annotations

from typing import NamedTuple


class Took(NamedTuple):
    """The durations of one round, in seconds. Time before the end of the previous round does not count.

    `seconds`: by the gateway's clock. `by_verifier`: by the verifier's clock if the round directly followed another,
    because the gateway may read one answer late and the next one at once. `queued`: waiting at the verifier. `asked`:
    from request to answer.
    """

    seconds: float
    by_verifier: float
    queued: float
    asked: float


class RoundClock:
    """Measures rounds. While rounds directly follow one another, each begins at the end of the previous round."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._over_at: float | None = None

    def begin(self, now: float) -> float:
        """Return the time at which a round begins: the end of the previous round if it directly follows, else `now`."""
        began, self._ended = self._ended or now, None
        return began

    def end(self, now: float, began: float, sent_at: float, asked: float, queued: float, over_at: float) -> Took:
        """Return the durations of a round that ends at `now` by the gateway's clock, at `over_at` by the verifier's."""
        # A round sent ahead waits while the previous one computes.
        early = max(0.0, began - sent_at)
        before, self._over_at, self._ended = self._over_at, over_at, now
        seconds = now - began
        by_verifier = seconds if before is None else over_at - before or seconds
        return Took(seconds, by_verifier, max(0.0, queued - early), asked - early)

    def forget(self) -> None:
        """Forget the end of the last round, because no round directly follows it."""
        self._ended = self._over_at = None
