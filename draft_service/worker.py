"""The one thread that runs the draft model: takes activations and tasks from an inbox, and completes the tasks.

A task waits, for a bounded time, until the activations that it needs have been absorbed. Then the worker drafts for the
sequences that are ready and refuses the others: a draft that is behind costs speed, never a request.
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

# The most messages that may wait to be absorbed: enough for a whole replay and some seconds of rounds.
MAX_QUEUED = 1024

STALENESS_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0)

log = structlog.get_logger("draft_service")


@dataclass(frozen=True)
class DraftResult:
    """A task's result: `drafted` has a row for each item index in `ready`; `refused` has the other items' errors."""

    drafted: Drafted | None
    ready: list[int]
    refused: dict[int, RequestError]
    queue_seconds: float
    forward_seconds: float


@dataclass
class DraftTask:
    """A batch of B items to draft for, their sampling rows, and the largest k of any item.

    `absorbing_seconds`: the time that the model thread has spent absorbing activations since the task arrived;
    `absorbed_seconds`: the same for the last activations before the task arrived.
    """

    items: list[DraftItem]
    rows: SamplingRows
    k: int
    done: Future[DraftResult] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    absorbing_seconds: float = 0.0
    absorbed_seconds: float = 0.0


class Worker:
    """The model thread, which owns the drafter. Call `start` once; any thread may call the other public methods."""

    def __init__(self, drafter: Drafter, wait_seconds: float, on_gap: Callable[[list[str]], object]):
        self.drafter = drafter
        self.busy_seconds = 0.0
        # The number of verified positions that had not arrived when draft tokens were requested.
        self.staleness = Histogram(STALENESS_BUCKETS)
        self._wait, self._on_gap = wait_seconds, on_gap
        self._inbox: Inbox[Callable[[], None] | None] = Inbox()
        self._subscription = 0
        self._pending: list[DraftTask] = []
        self.pace = Pace()
        # Seconds that it took to absorb the last activations, if no request has come since.
        self._absorbed_seconds = 0.0
        # Seconds of a verifier's step, from the last request: no activations arrive during a step.
        self.verifier_step_seconds = 0.0
        # Time of the first request, since activations last arrived, that lacked activations.
        self._starved_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="draft-model", daemon=True)

    def starves(self, floor: float) -> bool:
        """True if no activations have arrived, though requests need them, for `floor` seconds and for eight of the
        verifier's steps: the stream may be stuck."""
        since = self._starved_since
        return since is not None and time.monotonic() - since > limit(self.verifier_step_seconds, floor)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=5)

    @property
    def behind(self) -> bool:
        """True if so many messages wait to be absorbed that `absorb` refuses more."""
        return len(self._inbox) >= MAX_QUEUED

    def forget_all(self) -> None:
        """Drop all sequences, and the messages of earlier subscriptions that are not absorbed yet."""
        self._subscription += 1
        self._starved_since = None
        self._inbox.put(self.drafter.forget_all)

    def end(self, sequence_ids: list[str]) -> None:
        self._inbox.put(lambda: self.drafter.end(sequence_ids))

    def absorb(self, verified: Verified, then: Callable[[], object]) -> None:
        """Queue activations; call `then` when their rows can be freed. Raises OutOfCapacity if the queue is full."""
        if self.behind:
            raise OutOfCapacity(f"{MAX_QUEUED} messages wait to be absorbed")
        subscription = self._subscription
        self._inbox.put(lambda: self._absorb_of(subscription, verified, then))

    def do(self, action: Callable[[], None]) -> None:
        """Queue an action for the model thread and return. If the action raises, the exception is logged."""
        self._inbox.put(action)

    def draft(self, task: DraftTask) -> None:
        """Queue a task. The model thread completes a task once its activations are absorbed or its timeout is over."""
        self._inbox.put(lambda: self._await_activations(task))

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take():
                self._answer_due()

    def _answer_due(self) -> None:
        """Draft for the pending tasks that have all activations or have waited long enough."""
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
        """Draft for the items that pass the drafter's check. Complete the task, with the exception if one is raised.

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
            worked = task.absorbed_seconds + absorbing + time.monotonic() - began
            queued = began - task.arrived - absorbing
            task.done.set_result(DraftResult(drafted, ready, refused, queued, worked))
        except Exception as error:  # keep the thread running, unless its GPU is lost
            end_if_device_lost(error)
            task.done.set_exception(error)
        self.busy_seconds += time.monotonic() - began

    def _take(self) -> bool:
        """Run the actions in the inbox; wait for one at most until a pending task's timeout. Return False to stop."""
        self.pace.rest()
        arrived = self._inbox.take(MAX_QUEUED, self._patience())
        self.pace.work()
        for action in arrived:
            if action is None:
                return False
            try:
                action()
            except Exception as error:  # keep the thread: missing activations cost less than a dead draft
                end_if_device_lost(error)
                log.exception("something that arrived could not be taken")
        return True

    def _await_activations(self, task: DraftTask) -> None:
        for item in task.items:
            self.staleness.observe(self.drafter.staleness(item))
        task.absorbed_seconds, self._absorbed_seconds = self._absorbed_seconds, 0.0
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
        self._absorbed_seconds = 0.0 if self._pending else seconds
        for task in self._pending:
            task.absorbing_seconds += seconds
        if gaps:
            self._on_gap(gaps)
