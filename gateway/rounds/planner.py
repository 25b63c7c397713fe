"""Plans and sends rounds: the next round even before the answer to the current one, if that pays.

The next round can be sent before the answer because the verifier knows the committed positions and asks the draft.
Does not know: the meaning of an answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.rounds.drafting import Drafting, DraftPlan
from gateway.rounds.round_times import Load
from gateway.rounds.scheduler import Batch, Scheduler
from gateway.sequence import Sequence
from gateway.verifier_client import SentBatch, VerifierClient
from spire.v1 import verifier_pb2


@dataclass(slots=True)
class Round:
    """A planned round: its batch, its load, and whether it is plain, that is without draft tokens.

    `request`, `plan` and `sent` (sequences in the request) are set when it is written, `asked` when it is sent.
    """

    batch: Batch
    load: Load
    plain: bool
    plan: DraftPlan = field(default_factory=DraftPlan)
    sent: list[Sequence] = field(default_factory=list)
    sent_at: float = 0.0
    request: verifier_pb2.RoundsRequest | None = None
    asked: SentBatch | None = None


class Rounds:
    """Plans and sends at most two rounds: the one under way, which the engine has taken, and the next one."""

    def __init__(self, scheduler: Scheduler, drafting: Drafting, verifier: VerifierClient, config: GatewayConfig):
        self._scheduler, self._drafting, self._verifier = scheduler, drafting, verifier
        self._deadline, self._patience = config.verify_deadline, config.draft_deadline
        # The round after the one under way, if it is planned.
        self.next: Round | None = None

    def take(self) -> Round | None:
        """Return the next round, planned now unless planned earlier; None if no sequence is free for a round."""
        following, self.next = self.next, None
        return following or self._planned(self._scheduler.batch())

    async def send(self, current: Round) -> None:
        """Send a round unless sent already. Plan the next one, and send that too, before the answer, if it pays."""
        if current.asked is None:
            await self._ask(current)
        if following := self._planned(self._scheduler.batch(after=current.batch)):
            self.next = following
            model = self._verifier.model
            # The most sequences of a plain round during which the next round is sent ahead.
            most_ahead = model.info.most_sequences_ahead if model else 0
            if not current.plain or len(current.sent) <= most_ahead:
                await self.follow()
            elif following.plain:
                # Written now so that it can be sent as soon as the answer arrives.
                self._write(following)

    async def follow(self) -> None:
        """Send the next round, if one is planned and not sent yet."""
        if self.next and self.next.asked is None:
            await self._ask(self.next)

    def forget_next(self) -> None:
        following, self.next = self.next, None
        if following:
            self._scheduler.end_round(following.batch)
            if following.asked:
                following.asked.answer.cancel()

    def _planned(self, batch: Batch) -> Round | None:
        """Choose k for a batch and return its round; None if the batch is empty."""
        if not batch:
            return None
        sequences = list(batch.values())
        load = self._drafting.choose(sequences, bool(self._scheduler.starting))
        return Round(batch, load, not any(map(self._drafting.depth, sequences)))

    async def _ask(self, planned: Round) -> None:
        """Send a round to the verifier if any of its sequences still runs."""
        if planned.request is None or planned.sent != self._scheduler.still(planned.batch):
            self._write(planned)
        if planned.sent and planned.request:
            planned.sent_at = time.monotonic()
            # Sent before other tasks run: listeners now have text of the previous round to write.
            planned.asked = await self._verifier.ask(planned.request, self._deadline)

    def _write(self, planned: Round) -> None:
        """Build the protocol message of a round without sending it."""
        planned.sent = self._scheduler.still(planned.batch)
        planned.plan = self._drafting.ask(planned.sent)
        # Filled in place: a message built from other messages would copy them.
        planned.request = request = verifier_pb2.RoundsRequest()
        request.verify.patience_seconds = self._patience
        for sequence in planned.sent:
            before = sequence.under_way - 1  # rounds not answered yet
            item = request.verify.items.add(sequence_id=sequence.wire_id)
            item.round, item.base = sequence.round + before + 1, 0 if before else sequence.base
            item.k = planned.plan.asked.get(sequence.wire_id, 0)
            if item.k:
                item.least_standing = self._drafting.least_standing(sequence)
            item.paused = self._drafting.pause(sequence)
