"""The one thread that runs the draft model, between two queues: what arrives, and futures of what was asked.

A proposal waits, for a bounded time, until the activations it needs have been absorbed; then it is drafted for whoever
is ready, and the others get nothing: a draft that is behind costs speed, never a request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import structlog
import torch

from draft_service.drafter import Drafter, Verified
from spire.drafting import ProposeAnswer, ProposeTask, answer
from spire.errors import OutOfCapacity
from spire.histogram import Histogram
from spire.model.lost_device import end_if_device_lost
from spire.pace import Pace, limit
from spire.rpc.inbox import Inbox
from spire.rpc.line import Line
from spire.turns import take_short_turns

# Messages that wait to be absorbed at most: a whole replay, and some seconds of rounds.
MAX_QUEUED = 1024

STALENESS_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0)

log = structlog.get_logger("draft_service")


class Worker:
    """Owns the drafter. Call `start` once; everything else may be called from any thread."""

    def __init__(self, drafter: Drafter, wait_seconds: float, on_gap: Callable[[list[str]], object]):
        self.drafter = drafter
        self.busy_seconds = 0.0
        # Verified positions that had not arrived when a guess was asked for.
        self.staleness = Histogram(STALENESS_BUCKETS)
        self._wait, self._on_gap = wait_seconds, on_gap
        self._inbox: Inbox[Callable[[], None] | None] = Inbox()
        self._subscription = 0
        self._pending: list[ProposeTask] = []
        self.pace = Pace()
        # What a step of the verifier takes, as it said last: nothing arrives for so long.
        self.verifier_step_seconds = 0.0
        # Since when proposals have found their sequences behind without anything arriving.
        self._starved_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="draft-model", daemon=True)

    def starves(self, floor: float) -> bool:
        """Whether proposals have waited in vain, and nothing has arrived, for longer than the verifier's steps and
        `floor` seconds explain: a stream may be stuck."""
        since = self._starved_since
        return since is not None and time.monotonic() - since > limit(self.verifier_step_seconds, floor)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=5)

    @property
    def behind(self) -> bool:
        """Whether so much waits that nothing more is taken."""
        return len(self._inbox) >= MAX_QUEUED

    def forget_all(self) -> None:
        """Also what waits to be absorbed: it was of an earlier subscription."""
        self._subscription += 1
        self._starved_since = None
        self._inbox.put(self.drafter.forget_all)

    def end(self, sequence_ids: list[str]) -> None:
        self._inbox.put(lambda: self.drafter.end(sequence_ids))

    def absorb(self, verified: Verified, then: Callable[[], object]) -> None:
        """Take a message. `then` is called when its rows have been read and are needed no more.

        Raises OutOfCapacity when too many wait: the draft has to begin anew.
        """
        if self.behind:
            raise OutOfCapacity(f"{MAX_QUEUED} messages wait to be absorbed")
        subscription = self._subscription
        self._inbox.put(lambda: self._absorb_of(subscription, verified, then))

    async def propose(self, task: ProposeTask) -> ProposeAnswer:
        self._inbox.put(lambda: self.await_activations(task))
        return await asyncio.wrap_future(task.done)

    def read(self, line: Line, hear: Callable[[bytes], None]) -> None:
        """Have the model's thread hear what comes by a line, in its turn."""
        self._inbox.read(line, lambda packet: partial(hear, packet), lambda: None)

    # --- on the model thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        take_short_turns()
        with torch.inference_mode():
            while self._take():
                self._answer_due()

    def _answer_due(self) -> None:
        """Each is looked at once: a moment later another answer may be due.

        Nothing of an answer is held afterwards: it may lie in a ring of a subscription that has ended.
        """
        looked_at, self._pending = self._pending, []
        for task in looked_at:
            if self._due(task):
                self._notice(task)
                with self.pace.step(f"draft {task.k}", task.k * len(task.guesses)):
                    self.busy_seconds += answer(task, self.drafter.check, self.drafter.propose)
            else:
                self._pending.append(task)

    def _take(self) -> bool:
        """Do everything that has arrived, waiting for something if nothing is pending. False: stop."""
        self.pace.rest()
        arrived = self._inbox.take(MAX_QUEUED, self._patience())
        self.pace.work()
        for action in arrived:
            if action is None:
                return False
            self._do(action)
        return True

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # the thread lives on: a worse guess costs speed, none at all more
            end_if_device_lost(error)
            log.exception("something that arrived could not be taken")

    def await_activations(self, task: ProposeTask) -> None:
        """Draft as soon as can be."""
        for guess in task.guesses:
            self.staleness.observe(self.drafter.staleness(guess))
        self._pending.append(task)

    def _patience(self) -> float | None:
        if not self._pending:
            return None
        return max(0.0, min(task.arrived for task in self._pending) + self._wait - time.monotonic())

    def _due(self, task: ProposeTask) -> bool:
        late = time.monotonic() >= task.arrived + self._wait
        return late or not any(self.drafter.behind(guess) for guess in task.guesses)

    def _notice(self, task: ProposeTask) -> None:
        if self._starved_since is None and any(self.drafter.behind(guess) for guess in task.guesses):
            self._starved_since = time.monotonic()

    def _absorb_of(self, subscription: int, verified: Verified, then: Callable[[], object]) -> None:
        if subscription == self._subscription:
            self.absorb_now(verified, then)
        else:
            then()

    def absorb_now(self, verified: Verified, then: Callable[[], object]) -> None:
        """As `absorb`, at once."""
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
