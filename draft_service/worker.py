"""The one thread that runs the draft model: takes activations and tasks from an inbox, and completes the tasks.

A task waits, for a bounded time, until the activations that it needs have been absorbed. Then the sequences that are
ready are drafted for and the others are refused: a draft that is behind costs speed, never a request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
import torch

from draft_service.drafter import Drafter, Verified
from spire.decoding.drafting import DraftTask, answer
from spire.errors import OutOfCapacity
from spire.lost_device import end_if_device_lost
from spire.service.histogram import Histogram
from spire.service.inbox import Inbox
from spire.service.pace import Pace, limit

# Messages that may wait to be absorbed: a whole replay, and some seconds of rounds.
MAX_QUEUED = 1024

STALENESS_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0)

log = structlog.get_logger("draft_service")


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

    # --- on the model thread ------------------------------------------------------------------------------------

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
                self.busy_seconds += answer(task, self.drafter.check, self.drafter.propose)

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
