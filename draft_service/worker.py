"""The one thread that runs the draft model: takes activations and tasks from an inbox, and completes the tasks.

A task waits, for a bounded time, until the activations that it needs have been absorbed. Then the sequences that are
ready are drafted for and the others are refused: a draft that is behind costs speed, never a request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog
import torch

from draft_service.drafter import Drafter, Verified
from spire.decoding.drafting import Drafted, DraftItem
from spire.decoding.sampling import SamplingRows
from spire.errors import OutOfCapacity, RequestError
from spire.lost_device import end_if_device_lost
from spire.service.histogram import Histogram
from spire.service.inbox import Inbox
from spire.service.pace import Pace, limit

# Messages that may wait to be absorbed: a whole replay, and some seconds of rounds.
MAX_QUEUED = 1024

STALENESS_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0)

log = structlog.get_logger("draft_service")


@dataclass(frozen=True)
class DraftResult:
    """`drafted` has one row for each item in `ready`; `refused` has the errors of the other items."""

    drafted: Drafted | None
    ready: list[int]
    refused: dict[int, RequestError]
    queue_seconds: float
    forward_seconds: float


@dataclass
class DraftTask:
    """A batch to draft for: B items, their sampling rows, and the largest k of any item.

    `absorbing_seconds`: the time since arrival that the model spent absorbing activations.
    """

    items: list[DraftItem]
    rows: SamplingRows
    k: int
    done: Future[DraftResult] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    absorbing_seconds: float = 0.0


class Worker:
    """The model thread, which owns the drafter. Call `start` once; any thread may call the other public methods."""

    def __init__(self, drafter: Drafter, wait_seconds: float, on_gap: Callable[[list[str]], object]):
        self.drafter = drafter
        self.busy_seconds = 0.0
        # Verified positions that had not arrived when draft tokens were asked for.
        self.staleness = Histogram(STALENESS_BUCKETS)
        self._wait, self._on_gap = wait_seconds, on_gap
        self._inbox: Inbox[Callable[[], None] | None] = Inbox()
        self._subscription = 0
        self._pending: list[DraftTask] = []
        self.pace = Pace()
        # Seconds of a verifier's step, from the last request: no activations arrive during a step.
        self.verifier_step_seconds = 0.0
        # Time of the first request that found its sequences behind since activations last arrived.
        self._starved_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="draft-model", daemon=True)

    def starves(self, floor: float) -> bool:
        """True if requests have found their sequences behind, with nothing arriving, for `floor` seconds and for eight
        of the verifier's steps: the stream may be stuck."""
        since = self._starved_since
        return since is not None and time.monotonic() - since > limit(self.verifier_step_seconds, floor)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=5)

    @property
    def behind(self) -> bool:
        """True if so many messages wait that `absorb` refuses more."""
        return len(self._inbox) >= MAX_QUEUED

    def forget_all(self) -> None:
        """Forget all sequences, and the messages of earlier subscriptions that wait to be absorbed."""
        self._subscription += 1
        self._starved_since = None
        self._inbox.put(self.drafter.forget_all)

    def end(self, sequence_ids: list[str]) -> None:
        self._inbox.put(lambda: self.drafter.end(sequence_ids))

    def absorb(self, verified: Verified, then: Callable[[], object]) -> None:
        """Queue a message; `then` is called when its rows are no longer needed. Raises OutOfCapacity if full."""
        if self.behind:
            raise OutOfCapacity(f"{MAX_QUEUED} messages wait to be absorbed")
        subscription = self._subscription
        self._inbox.put(lambda: self._absorb_of(subscription, verified, then))

    def do(self, action: Callable[[], None]) -> None:
        """Queue an action for the model thread and return. If the action raises, the exception is logged."""
        self._inbox.put(action)

    def draft(self, task: DraftTask) -> None:
        """Draft once the activations are absorbed or the wait is over. The model thread sets `task.done`."""
        self._inbox.put(lambda: self._await_activations(task))

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take():
                self._answer_due()

    def _answer_due(self) -> None:
        """Answer the pending tasks that are due. Keep no reference to an answer: its ring's subscription may end."""
        looked_at, self._pending = self._pending, []
        for task in looked_at:
            if time.monotonic() < task.arrived + self._wait and self._behind(task):
                self._pending.append(task)
                continue
            if self._starved_since is None and self._behind(task):
                self._starved_since = time.monotonic()
            with self.pace.step(f"draft {task.k}", task.k * len(task.items)):
                self._answer(task)

    def _answer(self, task: DraftTask) -> None:
        """Draft for the items that the drafter accepts, and complete the task even after an exception.

        Nothing is computed for a cancelled task.
        """
        began = time.monotonic()
        if not task.done.set_running_or_notify_cancel():
            return
        try:
            refused: dict[int, RequestError] = {}
            for index, item in enumerate(task.items):
                try:
                    self.drafter.check(item)
                except RequestError as error:
                    refused[index] = error
            ready = [index for index in range(len(task.items)) if index not in refused]
            drafted = None
            if ready and task.k:
                items, rows = [task.items[index] for index in ready], task.rows
                if refused:
                    rows = rows.select(torch.tensor(ready, device=rows.temperature_B.device))
                drafted = self.drafter.propose(items, task.k, rows)
            absorbing = task.absorbing_seconds
            queued, worked = began - task.arrived - absorbing, absorbing + time.monotonic() - began
            task.done.set_result(DraftResult(drafted, ready, refused, queued, worked))
        except Exception as error:  # keep the thread running, unless its GPU is lost
            end_if_device_lost(error)
            task.done.set_exception(error)
        self.busy_seconds += time.monotonic() - began

    def _take(self) -> bool:
        """Wait for messages, at most until a pending task is late, and process them. Return False to stop."""
        self.pace.rest()
        arrived = self._inbox.take(MAX_QUEUED, self._patience())
        self.pace.work()
        for action in arrived:
            if action is None:
                return False
            try:
                action()
            except Exception as error:  # keep the thread: a worse draft costs speed, no draft costs more
                end_if_device_lost(error)
                log.exception("something that arrived could not be taken")
        return True

    def _await_activations(self, task: DraftTask) -> None:
        for item in task.items:
            self.staleness.observe(self.drafter.staleness(item))
        self._pending.append(task)

    def _patience(self) -> float | None:
        if not self._pending:
            return None
        return max(0.0, min(task.arrived for task in self._pending) + self._wait - time.monotonic())

    def _behind(self, task: DraftTask) -> bool:
        return any(self.drafter.behind(item) for item in task.items)

    def _absorb_of(self, subscription: int, verified: Verified, then: Callable[[], object]) -> None:
        if subscription != self._subscription:
            then()
            return
        began = time.monotonic()
        self._starved_since = None
        with self.pace.step("absorb", sum(span.count for span in verified.spans)):
            gaps = self.drafter.absorb(verified)
        then()
        seconds = time.monotonic() - began
        self.busy_seconds += seconds
        for task in self._pending:
            task.absorbing_seconds += seconds
        if gaps:
            self._on_gap(gaps)
