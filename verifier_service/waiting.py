"""Starts that wait for room: each gateway's in the order in which they came, and the gateways by what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from spire.errors import OutOfCapacity
from verifier_service.tasks import StartTask


class Waiting:
    """At most `most` of each gateway: more than it has places are no use to it."""

    def __init__(self, most: int):
        self._most = most
        # By sequence id, the oldest first.
        self._tasks: dict[str, StartTask] = {}

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __iter__(self) -> Iterator[StartTask]:
        return iter(self._tasks.values())

    def get(self, sequence_id: str) -> StartTask | None:
        return self._tasks.get(sequence_id)

    def add(self, task: StartTask) -> None:
        """At the end, or in the place of the same Start. Raises OutOfCapacity."""
        if sum(other.gateway == task.gateway for other in self) >= self._most:
            raise OutOfCapacity(f"{self._most} sequences of this gateway wait for room already: that is the most")
        self._tasks[task.start.sequence_id] = task

    def replace(self, task: StartTask) -> None:
        """The same Start came again, by another stream."""
        self._tasks[task.start.sequence_id] = task

    def remove(self, sequence_id: str) -> StartTask | None:
        return self._tasks.pop(sequence_id, None)

    def next(self, held: Counter[str]) -> StartTask | None:
        """The oldest of the gateway that holds the fewest. Nobody goes before it, or long prompts would never start."""
        return min(self, key=lambda task: held[task.gateway], default=None)
