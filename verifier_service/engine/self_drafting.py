"""The target as its own draft (MagicDec): takes draft requests without gRPC and drafts on the engine's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence as Rows
from typing import NamedTuple

import structlog

from spire.decoding.drafting import Drafted
from spire.lost_device import end_if_device_lost
from spire.service.pace import Pace
from spire.v1 import verifier_pb2 as pb
from verifier_service.engine.batch import Item, Q, ReadQ, VerifyTask
from verifier_service.engine.sequence import HeldSequence
from verifier_service.engine.step import ModelSteps
from verifier_service.metrics import INTERNAL, VerifierMetrics

log = structlog.get_logger("verifier_service")


class Wish(NamedTuple):
    """An item of a batch, its sequence, and the number of tokens to draft for it."""

    item: Item
    sequence: HeldSequence
    depth: int


class SelfDrafting:
    """The queue of batches that wait for draft tokens from the target itself, oldest first."""

    def __init__(self, steps: ModelSteps, sequences: Mapping[str, HeldSequence], metrics: VerifierMetrics, pace: Pace):
        self._steps, self._sequences, self._metrics, self._pace = steps, sequences, metrics, pace
        self._waiting: deque[tuple[VerifyTask, Rows[Wish], float]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def ask(self, task: VerifyTask, wishes: Rows[Wish]) -> None:
        """Queue these items of a batch. The target drafts for them before the next step; the batch waits until then."""
        task.awaited += 1
        self._metrics.draft_requests.labels(INTERNAL).inc()
        self._waiting.append((task, wishes, time.perf_counter()))

    def draft(self) -> None:
        """Draft for each queued batch. If drafting fails, the blocks of the batch are decoded plainly."""
        while self._waiting:
            task, wishes, asked_at = self._waiting.popleft()
            began = time.perf_counter()
            try:
                # Skip sequences that have ended meanwhile.
                live = [one for one in wishes if self._sequences.get(one.sequence.id) is one.sequence and one.depth]
                self._draft(live)
            except Exception as error:
                end_if_device_lost(error)
                log.exception("the target could not draft for itself", blocks=len(wishes))
                for wish in wishes:
                    wish.item.undrafted = pb.UNDRAFTED_ERROR
            over = time.perf_counter()
            task.awaited -= 1
            task.drafting.queue_seconds, task.drafting.forward_seconds = began - asked_at, over - began
            task.drafting_seconds = max(task.drafting_seconds, over - asked_at)
            self._metrics.busy_seconds.labels("draft").inc(over - began)

    def _draft(self, wishes: list[Wish]) -> None:
        if not wishes:
            return
        wishes.sort(key=lambda wish: wish.sequence.slot)  # the order of slots in a step
        k = max(wish.depth for wish in wishes)
        slots, newest = [wish.sequence.slot for wish in wishes], [wish.sequence.newest for wish in wishes]
        with self._pace.step(f"draft {k}", len(wishes), forwards=k):
            drafted = self._steps.draft(slots, newest, k, self._steps.pipeline.of(slots), self._pace.work)
        self._metrics.steps.labels("draft").inc(k)
        self._metrics.positions.labels("draft").inc(k * len(wishes))
        for row, (wish, tokens) in enumerate(zip(wishes, drafted.tokens_BK.tolist(), strict=True)):
            wish.item.tokens, wish.item.q = tokens[: wish.depth], _q_of(drafted, row)


def _q_of(drafted: Drafted, row: int) -> ReadQ | None:
    if drafted.probs_BKM is None:
        return None
    q = Q(drafted.probs_BKM, drafted.probs_BKM.shape[-1], drafted.ids_BKM, row)
    return lambda *_: q
