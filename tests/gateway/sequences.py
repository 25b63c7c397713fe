"""Sequences with names, and what a scheduler is asked and told about them in its tests."""

from __future__ import annotations

from gateway.rounds.scheduler import Scheduler
from gateway.sequence import Sequence
from spire.v1.tensor_pb2 import Sampling

END = 1


def sequence(name: str, prompt: int = 3, max_tokens: int = 8, k: int = 4) -> Sequence:
    return Sequence(name, list(range(2, 2 + prompt)), Sampling(), max_tokens, k, frozenset({END}))


def names(sequences: object) -> list[str]:
    return [s.id for s in sequences]  # type: ignore[attr-defined]


def start_all(scheduler: Scheduler) -> list[Sequence]:
    starts = scheduler.admit()
    for one in starts:
        scheduler.started(one, 7)
    return starts


def ask(scheduler: Scheduler, names: str, key: str = "") -> list[Sequence]:
    """One request of a choice for each letter."""
    choices = [sequence(name) for name in names]
    scheduler.add(choices, key)
    return choices
