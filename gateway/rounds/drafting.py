"""Drafting: chooses k (draft tokens per sequence), plans the requests to the draft, and learns from rounds.

A lost, slow or lagging draft costs speed but fails no request: blocks without draft tokens are decoded plainly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from gateway.config import GatewayConfig
from gateway.draft import ChosenDraft
from gateway.metrics import Metrics
from gateway.rounds.acceptance import BlockResult
from gateway.rounds.clock import Took
from gateway.rounds.depth import DepthController, Gain
from gateway.rounds.modelled import RoundModel
from gateway.rounds.round_times import Load
from gateway.sequence import Sequence
from gateway.verifier_client import VerifierClient
from spire.v1 import tensor_pb2, verifier_pb2

# Plain rounds in a row after which the draft is paused, because absorbing activations is work, and rounds in which the
# draft catches up before it is asked again.
_PLAIN_ROUNDS, _CATCHING_UP = 8, 2
# Share of a batch that must have had the greatest depth for the round's time to count for that depth.
_MOST_OF_A_BATCH = 0.75

_FALLBACKS = {
    verifier_pb2.UNDRAFTED_LOST: "draft_lost",
    verifier_pb2.UNDRAFTED_LATE: "draft_timeout",
    verifier_pb2.UNDRAFTED_BEHIND: "draft_behind",
    verifier_pb2.UNDRAFTED_OWING: "draft_absent",
}
_MISSED = {
    verifier_pb2.UNDRAFTED_LOST: "the verifier has no connection of the draft",
    verifier_pb2.UNDRAFTED_LATE: "the draft did not answer the verifier in time",
    verifier_pb2.UNDRAFTED_OWING: "the draft still owes the verifier an answer",
}

log = structlog.get_logger("gateway")


@dataclass(slots=True)
class DraftPlan:
    """The numbers of draft tokens that a round requests for its sequences, and later the numbers that were drafted.

    `asked`: tokens requested, empty if the draft is `lost`. `counts` (tokens drafted) and seconds are from the answer.
    """

    draft_id: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    lost: bool = False
    # The requested depths by wire id if the draft did not answer before the deadline.
    late: dict[str, int] = field(default_factory=dict)
    # "speculative", or "plain" if the round is decoded plainly only for comparison; empty without sequences to draft.
    decoding: str = ""
    model_seconds: float = 0.0
    waited_seconds: float = 0.0

    def drafted(self, sequence: Sequence) -> int:
        return self.counts.get(sequence.wire_id, 0)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Results of a round for the choice of k: the `depth` its time belongs to, and its blocks."""

    depth: int | None
    blocks: list[BlockResult]


class Drafting:
    """Chooses k (draft tokens), plans requests to the draft, learns from rounds. `draft` is None if drafting is off."""

    def __init__(self, draft: ChosenDraft | None, verifier: VerifierClient, config: GatewayConfig, metrics: Metrics):
        self._draft, self._verifier, self._config, self._metrics = draft, verifier, config, metrics
        self._depths = DepthController()
        # Load and k of the last round for which k was chosen.
        self._load, self.k = Load(1, 1), 0
        # Load and depth of the last drafted round whose time belongs to a single depth.
        self._seen: tuple[Load, int] | None = None
        self._model = RoundModel(config.calibration) if config.calibration else None
        # Number of rounds in a row with k = 0; the k for which the draft is catching up, and the rounds until then.
        self._plain_rounds, self._postponed, self._catching_up = 0, 0, 0
        # Accumulated plain_share; at 1 a round is left plain.
        self._plain_due = 0.0

    @property
    def tau(self) -> float:
        """The expected tokens per sequence of a round at the last chosen k."""
        return self._depths.acceptance.taus()[self.k]

    @property
    def multiplier(self) -> float | None:
        """The measured speedup over plain decoding; None for a fixed k without `plain_share` or drafted rounds."""
        if self._config.k is None:
            return self._depths.multiplier(self._load, self.k)
        return self._depths.multiplier(*self._seen) if self._seen and self._config.plain_share else None

    @property
    def gains(self) -> list[Gain]:
        """The gains of drafting under the loads measured so far; empty for a fixed k, which compares nothing."""
        return self._depths.gains() if self._config.k is None else []

    @property
    def multiplier_modelled(self) -> float | None:
        """The performance model's speedup over plain decoding at the measured tokens per round (τ); None if unknown."""
        target, draft = self._verifier.model, self._draft.info if self._draft else None
        if not (self._model and self._seen and target and draft and self._seen[1] <= self._depths.deepest):
            return None
        load, k = self._seen
        return self._model.multiplier(target.info, draft, load, k, self._depths.acceptance.taus()[k])

    def draft_for(self, sequence: Sequence) -> str:
        """Return the id of the draft that gets this sequence's activations, even if disconnected; empty if none."""
        return self._draft.id if sequence.speculates and self._draft else ""

    def choose(self, batch: list[Sequence], prefilling: bool) -> Load:
        """Choose k for the sequences of a batch whose requests leave it to the gateway. Return the batch's load."""
        context = sum(sequence.base for sequence in batch) / len(batch)
        automatic = [sequence for sequence in batch if sequence.automatic]
        load = Load(len(batch), context, prefilling, bool(automatic))
        rooms = [self._most(sequence) for sequence in automatic]
        if any(rooms):
            self._load, self.k = load, self._next_k(load, rooms)
        for sequence in automatic:
            sequence.k = self.k
        return load

    def _next_k(self, load: Load, rooms: list[int]) -> int:
        """Return k for the next round: the depth controller's, or 0 while a paused draft absorbs missed activations."""
        if self._catching_up:
            self._catching_up -= 1
            return 0 if self._catching_up else self._postponed
        k = self._depths.choose(load, rooms)
        if k and self._draft_idle:
            self._postponed, self._catching_up, self._plain_rounds = k, _CATCHING_UP, 0
            return 0
        self._plain_rounds = 0 if k else self._plain_rounds + 1
        return k

    @property
    def _draft_idle(self) -> bool:
        """True once _PLAIN_ROUNDS rounds in a row were plain. Never true if the target is its own draft (magicdec)."""
        return self._plain_rounds >= _PLAIN_ROUNDS and not (self._draft and self._draft.in_verifier)

    def pause(self, sequence: Sequence) -> bool:
        """Set and return `sequence.paused`: True (send no activations) if the draft will not be asked next round."""
        away = self._draft is None or not self._draft.up
        sequence.paused = away or (sequence.automatic and self._draft_idle)
        return sequence.paused

    def ask(self, batch: list[Sequence]) -> DraftPlan:
        """Return the plan of a batch's next round: the number of draft tokens to request for each sequence."""
        if self._draft is None:
            return DraftPlan(lost=True)
        if not self._draft.up:
            self._metrics.fallbacks["draft_absent"] += sum(s.depth > 0 and self._follows(s) for s in batch)
            return DraftPlan()
        # A paused sequence catches up first.
        wanted = [(s, depth) for s in batch if not s.paused and (depth := self.depth(s))]
        if not wanted:
            return DraftPlan()
        if self._left_plain():
            return DraftPlan(decoding="plain")
        return DraftPlan(self._draft.id, {s.wire_id: depth for s, depth in wanted}, decoding="speculative")

    def _left_plain(self) -> bool:
        """Return True if this round must be plain to measure plain decoding: one of every 1 / `plain_share` rounds."""
        self._plain_due += self._config.plain_share
        if self._plain_due < 1:
            return False
        self._plain_due -= 1
        return True

    def depth(self, sequence: Sequence) -> int:
        """Return the number of draft tokens for a sequence in the round for which k was last chosen."""
        return min(sequence.k, self._most(sequence)) if sequence.k else 0

    def least_standing(self, sequence: Sequence) -> float:
        """Return the probability below which the draft stops in a sequence's next round; 0 if it does not stop."""
        depth = self.depth(sequence)
        # The first token is always drafted: at depth 1 there is nothing to judge.
        if depth <= 1 or sequence.stop == "off" or not (self._draft and self._draft.info and self._draft.info.stops):
            return 0.0
        if sequence.stop == "threshold":
            return 1.0 - self._config.stop_threshold
        return self._depths.least_standing(self._load, depth, sequence.by_block)

    def _most(self, sequence: Sequence) -> int:
        """Return the most draft tokens for a sequence, by both services' limits; 0 if its draft cannot be asked now.

        Without a draft, a round counts as plain for sending the next one before its answer and for learning.
        """
        draft, model = (self._draft.info if self._draft and self._draft.up else None), self._verifier.model
        if draft is None or model is None or not self._follows(sequence):
            return 0
        return min(sequence.room, draft.max_speculation_depth, model.info.max_speculation_depth)

    def _follows(self, sequence: Sequence) -> bool:
        """Return True if the draft that is connected now receives the activations of this sequence."""
        return self._draft is not None and sequence.draft_id == self._draft.id != ""

    def settle(self, plan: DraftPlan, answer: verifier_pb2.VerifyBatchResult) -> None:
        """Update the plan, and the draft's circuit breaker, with the results of drafting in the verifier's answer."""
        if not plan.asked or self._draft is None:
            return
        found: set[verifier_pb2.Undrafted] = set()
        for result in answer.results:
            if result.undrafted:
                self._metrics.fallbacks[_FALLBACKS.get(result.undrafted, "draft_error")] += 1
                found.add(result.undrafted)
            elif result.status.code == tensor_pb2.CODE_OK:
                plan.counts[result.sequence_id] = result.drafted
            else:  # the draft tokens may be the cause
                plan.counts[result.sequence_id] = plan.asked.get(result.sequence_id, 0)
        plan.model_seconds = answer.drafting.forward_seconds + answer.drafting.sample_seconds
        plan.waited_seconds = answer.drafting.queue_seconds
        if missed := found & _MISSED.keys():
            if missed == {verifier_pb2.UNDRAFTED_LATE}:
                plan.late = plan.asked
            plan.lost, plan.asked = True, {}
            log.warning("decoding plainly", reason=_MISSED[min(missed)])
        if plan.draft_id != self._draft.id:
            return
        if verifier_pb2.UNDRAFTED_LATE in found:
            self._draft.late()
        elif not missed:
            self._draft.circuit.in_time()

    def shown_by(self, batch: list[Sequence], plan: DraftPlan, answer: verifier_pb2.VerifyBatchResult) -> Evidence:
        """Return what a round shows for the choice of k. Call before its commit: later, sequences may lack their draft.

        A block that the draft answered without usable draft tokens counts as rejected.
        """
        fine = {result.sequence_id: result for result in answer.results if result.status.code == tensor_pb2.CODE_OK}
        blocks = [
            BlockResult(depth, plan.counts.get(wire_id, 0) or depth, fine[wire_id].accepted)
            for wire_id, depth in plan.asked.items()
            if wire_id in fine
        ]
        return Evidence(self._explained_by(batch, plan), blocks)

    def learn(self, load: Load, shown: Evidence, plan: DraftPlan, verified: verifier_pb2.Timings, took: Took) -> None:
        """Pass a round's results and its time, without prefill of other sequences, to the depth controller."""
        if shown.depth and plan.decoding == "speculative" and not plan.lost:
            self._seen = load, shown.depth
        waited = plan.waited_seconds if self._draft and self._draft.in_verifier else 0.0
        beside = verified.total_seconds - verified.forward_seconds - verified.sample_seconds if load.prefilling else 0.0
        # Without the time that was spent on prefill of other sequences.
        own = took.by_verifier - took.queued - (waited + max(0.0, beside))
        # If less than the forward, the wait overlapped with the previous round and was subtracted twice.
        possible = own >= verified.forward_seconds + verified.sample_seconds
        if plan.late and shown.depth and possible:
            self._depths.missed(load, shown.depth, own)
        else:
            self._depths.observe(load, shown.depth if possible else None, own, shown.blocks)

    def _explained_by(self, batch: list[Sequence], plan: DraftPlan) -> int | None:
        """Return the depth a round's time belongs to; None if too few blocks had the greatest depth or a draft is lost.

        A round whose draft did not answer in time counts too: its time is a lower bound for a drafted round's.
        """
        if plan.lost and not plan.late:
            return None
        # A round in which drafts stop early belongs to the depth that was asked: what is learned is what asking brings.
        depths_by_id = plan.late or {one: plan.asked.get(one, 0) if count else 0 for one, count in plan.counts.items()}
        depths = [depths_by_id.get(sequence.wire_id, 0) for sequence in batch if self._follows(sequence)]
        if not depths:
            return None if plan.asked or plan.late else 0  # no sequence speculates
        deepest = max(depths)
        if depths.count(deepest) < _MOST_OF_A_BATCH * len(batch) or (deepest == 0 and plan.asked):
            return None
        return deepest
