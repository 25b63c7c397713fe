"""Rounds as they are planned and sent, each lane's one ahead of the answer where that pays.

A round needs nothing of the one before it but its order: the verifier knows where that one ends, and asks the draft
itself. Only what a verifier drafts with its own target is asked for here, and waits. What this does not know: what an
answer means.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.depth import Load
from gateway.peers import Asked, VerifierPeer
from gateway.scheduler import Batch, Scheduler
from gateway.sequence import Sequence
from gateway.speculation import Proposals, Speculation
from spire.v1 import verifier_pb2


@dataclass(slots=True)
class Round:
    """A batch and the k that was chosen for it; `request` once it is written, for those in `sent`, and `asked` once the
    verifier has it."""

    batch: Batch
    load: Load
    plain: bool
    proposals: Proposals = field(default_factory=Proposals)
    sent: list[Sequence] = field(default_factory=list)
    sent_at: float = 0.0
    request: verifier_pb2.RoundsRequest | None = None
    asked: Asked[verifier_pb2.VerifyBatchResult] | None = None


class Rounds:
    """Of every lane at most the round under way, which its engine holds, and the one after it."""

    def __init__(self, scheduler: Scheduler, speculation: Speculation, verifier: VerifierPeer, config: GatewayConfig):
        self._scheduler, self._speculation, self._verifier = scheduler, speculation, verifier
        self._deadline, self._patience = config.verify_deadline, config.propose_deadline
        # By lane: the round after the one under way.
        self._next: dict[int, Round] = {}

    def has_next(self, lane: int) -> bool:
        return lane in self._next

    def take(self, lane: int) -> Round | None:
        """The lane's next round; None where nobody is free for one."""
        return self._next.pop(lane, None) or self._planned(self._scheduler.batch())

    async def send(self, lane: int, current: Round) -> None:
        """Ask about it, if that was not done ahead, plan the round after it, and ask about that where it pays."""
        if current.asked is None:
            await self._ask(current)
        if not (current.proposals.ordered or current.plain):
            return
        if following := self._planned(self._scheduler.batch(after=current.batch)):
            self._next[lane] = following
            if not current.plain or len(current.sent) <= self._most_ahead:
                await self.follow(lane)
            elif following.plain:
                # So that it goes out at once when the answer has come.
                await self._write(following)

    async def follow(self, lane: int) -> None:
        """Ask about the lane's next round, if that was not done and nothing of it waits for this gateway."""
        following = self._next.get(lane)
        if following and following.asked is None and (following.plain or self._speculation.ordered):
            await self._ask(following)

    def forget_next(self, lane: int) -> None:
        if following := self._next.pop(lane, None):
            self._scheduler.end_round(following.batch)
            if following.asked:
                following.asked.answer.cancel()

    @property
    def _most_ahead(self) -> int:
        """Sequences of a plain round behind which another is sent at once."""
        return self._verifier.model.info.most_sequences_ahead if self._verifier.model else 0

    def _planned(self, batch: Batch) -> Round | None:
        """A round of these with the k that is chosen for them; None where there are none."""
        if not batch:
            return None
        sequences = list(batch.values())
        load = self._speculation.choose(sequences, bool(self._scheduler.starting))
        return Round(batch, load, not any(map(self._speculation.depth, sequences)))

    async def _ask(self, planned: Round) -> None:
        """Ask the draft, if it is to be drafted, and the verifier, if anybody in it goes on."""
        if planned.request is None or planned.sent != self._scheduler.still(planned.batch):
            await self._write(planned)
        if planned.sent and planned.request:
            planned.sent_at = time.monotonic()
            # Sent before anything else may run: whoever has heard of the round before it has text to write now.
            planned.asked = await self._verifier.ask(planned.request, self._deadline)

    async def _write(self, planned: Round) -> None:
        """All of asking about it but sending."""
        planned.proposals = await self._speculation.propose(self._scheduler.still(planned.batch))
        planned.sent = self._scheduler.still(planned.batch)
        planned.request = self._request(planned.sent, planned.proposals)

    def _request(self, batch: list[Sequence], proposals: Proposals) -> verifier_pb2.RoundsRequest:
        # Filled in place: q is the bulk of a round, and each message built from messages copies it again.
        request = verifier_pb2.RoundsRequest()
        request.verify.patience_seconds = self._patience
        for sequence in batch:
            before = sequence.under_way - 1  # rounds still to be answered
            item = request.verify.items.add(sequence_id=sequence.wire_id)
            item.round, item.base = sequence.round + before + 1, 0 if before else sequence.base
            if proposals.ordered:
                item.k = proposals.asked.get(sequence.wire_id, 0)
            item.quiet = self._speculation.hush(sequence)
            if proposal := proposals.by_id.get(sequence.wire_id):
                item.draft_tokens.extend(proposal.tokens)
                if proposal.HasField("q"):
                    item.q.CopyFrom(proposal.q)
        return request
