"""Speculation in the rounds of a batch: how deep, what the draft guesses, what a round has shown of it.

A draft that is gone, slow or behind costs speed and never a request: what it does not propose is decoded plainly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog

from gateway.config import GatewayConfig
from gateway.depth import DepthController, Load
from gateway.errors import PeerLost
from gateway.messages import wire_sampling
from gateway.metrics import Metrics
from gateway.modelled import RoundModel
from gateway.peers import DraftPeer, PeerTooLate, VerifierPeer
from gateway.sequence import Sequence
from spire.v1 import draft_pb2, tensor_pb2, verifier_pb2

# Plain rounds in a row after which the draft is told of no more, because following is work, and how many rounds it has
# to catch up before it is asked again.
_PLAIN_ROUNDS, _CATCHING_UP = 8, 2
# Share of a batch that must have had one depth for its time to be that depth's.
_MOST_OF_A_BATCH = 0.75

_FALLBACKS = {
    verifier_pb2.UNDRAFTED_LOST: "draft_lost",
    verifier_pb2.UNDRAFTED_LATE: "draft_timeout",
    verifier_pb2.UNDRAFTED_BEHIND: "draft_behind",
    verifier_pb2.UNDRAFTED_ERROR: "draft_error",
    verifier_pb2.UNDRAFTED_OWING: "draft_absent",
}
_MISSED = {
    verifier_pb2.UNDRAFTED_LOST: "the verifier has no connection of the draft",
    verifier_pb2.UNDRAFTED_LATE: "the draft did not answer the verifier in time",
    verifier_pb2.UNDRAFTED_OWING: "the draft still owes the verifier an answer",
}

log = structlog.get_logger("gateway")


@dataclass(slots=True)
class Proposals:
    """What the draft guessed, by wire id, and what it took. `asked`: depths by wire id, unless the draft was lost.

    Of an `ordered` round the verifier asks the draft: `counts`, how many tokens it guessed, come with the answer.
    """

    by_id: dict[str, draft_pb2.Proposal] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    ordered: bool = False
    lost: bool = False
    # Depths by wire id of a round that waited for the draft in vain, as long as it may.
    late: dict[str, int] = field(default_factory=dict)
    # Of a round that was to be drafted: speculative, or plain because it was sampled for comparison.
    decoding: str = ""
    model_seconds: float = 0.0
    waited_seconds: float = 0.0
    asked_seconds: float = 0.0

    def drafted(self, sequence: Sequence) -> int:
        return self.counts.get(sequence.wire_id, 0)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a round says of k: the one depth its time belongs to, if any, and (depth, accepted) of its blocks."""

    depth: int | None
    blocks: list[tuple[int, int]]


class Speculation:
    """The draft as the rounds see it, and the choice of k. It is without a draft where there is none."""

    def __init__(self, draft: DraftPeer | None, verifier: VerifierPeer, config: GatewayConfig, metrics: Metrics):
        self._draft, self._verifier, self._config, self._metrics = draft, verifier, config, metrics
        self._depths = DepthController()
        # Of the last round with a choice to make.
        self._load, self.k = Load(1, 1), 0
        # Of the last drafted round that one depth explains: its load and that depth.
        self._seen: tuple[Load, int] | None = None
        self._model = RoundModel.of(config.calibration) if config.calibration else None
        # How many rounds in a row k was 0; k of the round for which the draft catches up, and how many are before it.
        self._plain_rounds, self._postponed, self._catching_up = 0, 0, 0
        # Rounds, a fraction of one, that are still to be left plain.
        self._plain_due = 0.0

    @property
    def tau(self) -> float:
        """Expected tokens of a round at the depth that was chosen last."""
        return self._depths.acceptance.taus()[self.k]

    @property
    def multiplier(self) -> float | None:
        """Tokens a second at that depth over those of plain decoding, by what rounds have shown; None where k is fixed
        and no round is left plain."""
        if self._config.k is None:
            return self._depths.multiplier(self._load, self.k)
        return self._depths.multiplier(*self._seen) if self._seen and self._config.plain_share else None

    @property
    def multiplier_modelled(self) -> float | None:
        """What the performance model says of the last drafted round, with the τ that rounds have shown."""
        target, draft = self._verifier.model, self._draft.info if self._draft else None
        if not (self._model and self._seen and target and draft and self._seen[1] <= self._depths.deepest):
            return None
        load, k = self._seen
        return self._model.multiplier(target.info, draft, load, k, self._depths.acceptance.taus()[k])

    @property
    def ordered(self) -> bool:
        """Whether the verifier asks the draft, which follows it."""
        return self._draft is not None and not self._draft.in_verifier

    def draft_for(self, sequence: Sequence) -> str:
        """Whose activations to publish. A draft that is away for a moment is named all the same."""
        return self._draft.info.draft_id if sequence.speculates and self._draft and self._draft.info else ""

    def choose(self, batch: list[Sequence], prefilling: bool) -> Load:
        """Give the automatic sequences the k of this round."""
        context = sum(sequence.base for sequence in batch) / len(batch)
        load = Load(len(batch), context, prefilling)
        automatic = [sequence for sequence in batch if sequence.automatic]
        rooms = [self._most(sequence) for sequence in automatic]
        if any(rooms):
            self._load, self.k = load, self._next_k(load, rooms)
        for sequence in automatic:
            sequence.k = self.k
        return load

    def _next_k(self, load: Load, rooms: list[int]) -> int:
        """What the controller chooses, once the draft knows what it needs for it."""
        if self._catching_up:
            self._catching_up -= 1
            return 0 if self._catching_up else self._postponed
        k = self._depths.choose(load, rooms)
        if k and self._dozing:
            self._postponed, self._catching_up, self._plain_rounds = k, _CATCHING_UP, 0
            return 0
        self._plain_rounds = 0 if k else self._plain_rounds + 1
        return k

    @property
    def _dozing(self) -> bool:
        """Whether nobody has been drafted for long enough to leave the draft alone. The verifier follows nobody."""
        return self._plain_rounds >= _PLAIN_ROUNDS and not (self._draft and self._draft.in_verifier)

    def hush(self, sequence: Sequence) -> bool:
        """Settle whether the draft need not be told what this round gives, because it will not be asked in the next."""
        away = self._draft is None or not self._draft.up
        sequence.quiet = away or (sequence.automatic and self._dozing)
        return sequence.quiet

    async def propose(self, batch: list[Sequence]) -> Proposals:
        if self._draft is None:
            return Proposals(lost=True)
        if not self._draft.up:
            self._metrics.fallbacks["draft_absent"] += sum(map(self._misses_draft, batch))
            return Proposals()
        wanted = [(sequence, depth) for sequence in batch if (depth := self.depth(sequence))]
        # Who was quiet catches up first.
        wanted = [(sequence, depth) for sequence, depth in wanted if not sequence.quiet]
        if not wanted:
            return Proposals()
        if self._left_plain():
            return Proposals(decoding="plain")
        if not self._draft.in_verifier:
            asked = {sequence.wire_id: depth for sequence, depth in wanted}
            return Proposals(asked=asked, decoding="speculative", ordered=True)
        items = [
            draft_pb2.ProposeItem(
                sequence_id=sequence.wire_id,
                base=sequence.base,
                newest_token=sequence.newest_token,
                k=depth,
                sampling=wire_sampling(sequence.sampling),
            )
            for sequence, depth in wanted
        ]
        config, began = self._config, time.monotonic()
        deadline = config.verify_deadline if self._draft.in_verifier else config.propose_deadline
        try:
            answer, seconds = await self._draft.propose(items, deadline)
        except PeerLost as error:
            reason = "draft_timeout" if isinstance(error, PeerTooLate) else "draft_lost"
            self._metrics.fallbacks[reason] += len(wanted)
            log.warning("decoding plainly", reason=str(error))
            return Proposals(lost=True, decoding="speculative", asked_seconds=time.monotonic() - began)
        return self._usable(wanted, answer, seconds)

    def _left_plain(self) -> bool:
        """Whether this round is the one in so many that shows what plain decoding would take."""
        self._plain_due += self._config.plain_share
        if self._plain_due < 1:
            return False
        self._plain_due -= 1
        return True

    def depth(self, sequence: Sequence) -> int:
        """How many tokens to draft for it in the round that was chosen for."""
        return min(sequence.k, self._most(sequence))

    def _most(self, sequence: Sequence) -> int:
        """How many tokens could be drafted for it: no more than both services take, none while its draft is away.

        A round beside which the draft is away is a plain one: sent ahead as such, and as such learned from.
        """
        draft, model = (self._draft.info if self._draft and self._draft.up else None), self._verifier.model
        if draft is None or model is None or not self._follows(sequence):
            return 0
        return min(sequence.room, draft.max_speculation_depth, model.info.max_speculation_depth)

    def _misses_draft(self, sequence: Sequence) -> bool:
        """Whether it would be drafted if its draft were there."""
        return sequence.depth > 0 and self._follows(sequence)

    def _follows(self, sequence: Sequence) -> bool:
        """Whether the draft that is known now gets its activations."""
        return (
            self._draft is not None and self._draft.info is not None and sequence.draft_id == self._draft.info.draft_id
        )

    def _usable(
        self, wanted: list[tuple[Sequence, int]], answer: draft_pb2.ProposeBatchResult, seconds: float
    ) -> Proposals:
        model_seconds = answer.timings.forward_seconds + answer.timings.sample_seconds
        asked = {sequence.wire_id: depth for sequence, depth in wanted}
        waited_seconds = answer.timings.queue_seconds
        proposals = Proposals(
            asked=asked,
            decoding="speculative",
            model_seconds=model_seconds,
            waited_seconds=waited_seconds,
            asked_seconds=seconds,
        )
        by_id = {proposal.sequence_id: proposal for proposal in answer.proposals}
        for sequence, depth in wanted:
            proposal = by_id.get(sequence.wire_id)
            if proposal is None or proposal.status.code != tensor_pb2.CODE_OK or len(proposal.tokens) > depth:
                self._metrics.fallbacks["draft_error"] += 1
            elif not proposal.tokens:
                self._metrics.fallbacks["draft_behind"] += 1
            else:
                proposals.by_id[sequence.wire_id] = proposal
                proposals.counts[sequence.wire_id] = len(proposal.tokens)
        return proposals

    def settle(self, proposals: Proposals, answer: verifier_pb2.VerifyBatchResult) -> None:
        """Take over what an ordered round tells of its draft."""
        if not proposals.ordered or self._draft is None:
            return
        found: set[verifier_pb2.Undrafted] = set()
        for result in answer.results:
            if result.undrafted:
                self._metrics.fallbacks[_FALLBACKS.get(result.undrafted, "draft_error")] += 1
                found.add(result.undrafted)
            elif result.status.code == tensor_pb2.CODE_OK:
                proposals.counts[result.sequence_id] = result.drafted
            else:  # what the draft guessed may be why
                proposals.counts[result.sequence_id] = proposals.asked.get(result.sequence_id, 0)
        proposals.model_seconds = answer.drafting.forward_seconds + answer.drafting.sample_seconds
        proposals.waited_seconds = answer.drafting.queue_seconds
        if missed := found & _MISSED.keys():
            if missed == {verifier_pb2.UNDRAFTED_LATE}:
                proposals.late = proposals.asked
            proposals.lost, proposals.asked = True, {}
            log.warning("decoding plainly", reason=_MISSED[min(missed)])
            self._draft.missed(late=verifier_pb2.UNDRAFTED_LOST not in missed)
        else:
            self._draft.circuit.in_time()

    def shown_by(self, batch: list[Sequence], proposals: Proposals, answer: verifier_pb2.VerifyBatchResult) -> Shown:
        """Ask before the round is committed: what is committed may no longer follow the draft."""
        return Shown(self._explained_by(batch, proposals), self._blocks(answer, proposals))

    def learn(
        self, load: Load, shown: Shown, seconds: float, proposals: Proposals, verified: verifier_pb2.Timings
    ) -> None:
        """Take over what a round of `seconds` has shown."""
        if shown.depth and proposals.decoding == "speculative" and not proposals.lost:
            self._seen = load, shown.depth
        own = seconds - self._of_others(load, proposals, verified)
        # Less than its own forward took: it waited before the round before it was over, and that was taken off twice.
        possible = own >= verified.forward_seconds + verified.sample_seconds
        if proposals.late and shown.depth and possible:
            self._depths.missed(load, shown.depth, own)
        else:
            self._depths.observe(load, shown.depth if possible else None, own, shown.blocks)

    def _explained_by(self, batch: list[Sequence], proposals: Proposals) -> int | None:
        """The one depth that a round's time belongs to; None when a quarter of it had another, or had no draft.

        A round that waited for its draft in vain shows what drafting takes, at the least.
        """
        if proposals.lost and not proposals.late:
            return None
        depths_by_id = proposals.late or proposals.counts
        depths = [depths_by_id.get(sequence.wire_id, 0) for sequence in batch if self._follows(sequence)]
        if not depths and not proposals.asked:
            return 0  # nobody speculates
        deepest = max(depths, default=0)
        if depths.count(deepest) < _MOST_OF_A_BATCH * len(batch) or (deepest == 0 and proposals.asked):
            return None
        return deepest

    def _blocks(self, answer: verifier_pb2.VerifyBatchResult, proposals: Proposals) -> list[tuple[int, int]]:
        """(depth, accepted) of every block the draft was asked for: one that it left out counts as rejected."""
        fine = {result.sequence_id: result for result in answer.results if result.status.code == tensor_pb2.CODE_OK}
        return [(depth, fine[wire_id].accepted) for wire_id, depth in proposals.asked.items() if wire_id in fine]

    def _of_others(self, load: Load, proposals: Proposals, verified: verifier_pb2.Timings) -> float:
        """Seconds of a round that went to other sequences' prompts, before its own work or in one forward with it."""
        waited = proposals.waited_seconds if self._draft and self._draft.in_verifier else 0.0
        beside = verified.total_seconds - verified.forward_seconds - verified.sample_seconds if load.prefilling else 0.0
        return verified.queue_seconds + waited + max(0.0, beside)
