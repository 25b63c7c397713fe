"""The clock of rounds: what each took, by the gateway's clock and by the verifier's.

A pure data structure: callers pass every `now`. Does not know: what a round consists of.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one round since the end of the previous one, without what passed before that.

    `seconds` is by the gateway's clock, `by_verifier` by the verifier's if the round followed another at once: the
    gateway may read an answer late and the next one at once. `queued` is waiting at the verifier, `asked` is from
    request to answer.
    """

    seconds: float
    by_verifier: float
    queued: float
    asked: float


class RoundClock:
    """Knows when the last round ended, while rounds follow one another."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._over_at: float | None = None

    def begin(self, now: float) -> float:
        """Return when the next round begins: at the end of the previous one if that is known."""
        began, self._ended = self._ended or now, None
        return began

    def end(self, now: float, began: float, sent_at: float, asked: float, queued: float, over_at: float) -> Took:
        """End a round: sent at `sent_at`, answered after `asked` seconds, over at `over_at` by the verifier's clock."""
        # A round sent ahead waits while the previous one computes.
        early = max(0.0, began - sent_at)
        before, self._over_at, self._ended = self._over_at, over_at, now
        seconds = now - began
        by_verifier = seconds if before is None else over_at - before or seconds
        return Took(seconds, by_verifier, max(0.0, queued - early), asked - early)

    def forget(self) -> None:
        """No round follows the last one at once."""
        self._ended = self._over_at = None
