"""Backoff for a peer that answers too late."""

from __future__ import annotations


class Circuit:
    """A circuit breaker. `seconds`: the pause before a service that answered late is asked again; 0 when closed."""

    SHORTEST, LONGEST = 0.2, 10.0
    # About 23 answers in time make up for one late answer, which doubles the seconds.
    FORGIVING = 0.97

    def __init__(self) -> None:
        self.seconds = 0.0

    def late(self) -> None:
        self.seconds = min(max(self.SHORTEST, 2 * self.seconds), self.LONGEST)

    def in_time(self) -> None:
        self.seconds = self.seconds * self.FORGIVING if self.seconds > self.SHORTEST else 0.0
