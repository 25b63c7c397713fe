"""Starts that wait for room: by gateway, the one with the fewest sequences first, then in order of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from spire.errors import OutOfCapacity
from verifier_service.engine.tasks import StartTask


class Waiting:
    """The waiting Starts, at most `most` of each gateway: it has no use for more than there are slots."""

    def __init__(self, most: int):
        self._most = most
        # sequence id -> task, oldest first
        self._tasks: dict[str, StartTask] = {}

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __iter__(self) -> Iterator[StartTask]:
        return iter(self._tasks.values())

    def get(self, sequence_id: str) -> StartTask | None:
        return self._tasks.get(sequence_id)

    def add(self, task: StartTask) -> None:
        """Append a Start. Raises OutOfCapacity if the most of this gateway wait already."""
        if sum(other.gateway == task.gateway for other in self) >= self._most:
            raise OutOfCapacity(f"{self._most} sequences of this gateway wait for room already: that is the most")
        self._tasks[task.start.sequence_id] = task

    def replace(self, task: StartTask) -> None:
        """Replace a waiting Start that came again, by another stream, and keep its place."""
        self._tasks[task.start.sequence_id] = task

    def remove(self, sequence_id: str) -> StartTask | None:
        return self._tasks.pop(sequence_id, None)

    def next(self, held: Counter[str]) -> StartTask | None:
        """The oldest Start of the gateway with the fewest sequences. None may pass, or long prompts would not start."""
        return min(self, key=lambda task: held[task.gateway], default=None)
