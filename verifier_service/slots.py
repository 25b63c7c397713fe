"""Who holds which slot: sequences from admission to release, and all that is kept for them by slot."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Rows

import structlog
import torch

from spire.errors import InvalidRequest, OutOfCapacity, SpireError, UnknownSequence
from spire.rpc.errors import code_name, item_status
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.activations import Publisher
from verifier_service.batch import Limits
from verifier_service.metrics import VerifierMetrics
from verifier_service.prefixes import Prefixes
from verifier_service.prompts import Prompts
from verifier_service.sequence import Reply, Sequence, check_start
from verifier_service.step import ModelSteps
from verifier_service.tasks import StartTask

log = structlog.get_logger("verifier_service")
# How long a gateway that was refused counts as one that waits: while it does, it asks again much sooner.
_STILL_WAITING = 2.0


class Shares:
    """Fair shares of the slots between gateways: whoever has its share gives way to whoever waits and has less."""

    def __init__(self, slots: int):
        self._slots = slots
        self._refused: dict[str, float] = {}

    def check(self, gateway: str, held: Counter[str], now: float) -> None:
        """Raises OutOfCapacity for a gateway that has to give way. `held`: slots by gateway."""
        self._refused = {other: at for other, at in self._refused.items() if now - at < _STILL_WAITING}
        waiting = self._refused.keys() - {gateway}
        share = self._slots // (1 + len(waiting))
        if held[gateway] >= share and any(held[other] < share for other in waiting):
            self.refused(gateway, now)
            raise OutOfCapacity(f"this gateway holds its share of {share} of {self._slots} slots, and others wait")

    def refused(self, gateway: str, now: float) -> None:
        self._refused[gateway] = now

    def admitted(self, gateway: str) -> None:
        self._refused.pop(gateway, None)


class Slots:
    """The sequences that are held, in order of admission."""

    def __init__(
        self,
        steps: ModelSteps,
        publisher: Publisher,
        prefixes: Prefixes,
        prompts: Prompts,
        limits: Limits,
        metrics: VerifierMetrics,
    ):
        self.sequences: dict[str, Sequence] = {}
        self._cache, self._pipeline = steps.cache, steps.pipeline
        self._publisher, self._prefixes, self._prompts = publisher, prefixes, prompts
        self._limits, self._metrics = limits, metrics
        self._shares = Shares(self._cache.slots)

    def admit(self, task: StartTask) -> None:
        """Begin a sequence. Raises InvalidRequest or OutOfCapacity."""
        check_start(task.start, self._limits.vocab_size, self._limits.max_context)
        if task.start.adjustments.HasField("grammar") and task.matcher is None:
            raise InvalidRequest("grammars are not available at this verifier", "grammar")
        now = time.monotonic()
        self._shares.check(task.gateway, Counter(s.gateway for s in self.sequences.values()), now)
        try:
            slot = self._slot_for(len(task.start.tokens))
        except OutOfCapacity:
            self._shares.refused(task.gateway, now)
            raise
        self._shares.admitted(task.gateway)
        self._prefixes.begin(slot, task.start.tokens, task.start.cache_salt)
        prompt_L = torch.tensor(list(task.start.tokens))
        sequence = Sequence(task.start, slot, task.gateway, task.reply, prompt_L, task.received)
        self._pipeline.assign(slot, task.start, task.matcher)
        self.sequences[sequence.id] = sequence
        self._prompts.add(sequence)
        self._publisher.join(sequence.id, sequence.draft_id, slot)
        self._measure()
        log.debug("sequence begins", sequence=sequence.id, tokens=len(task.start.tokens), draft_id=sequence.draft_id)

    def _slot_for(self, length: int) -> int:
        """A slot with memory for a prompt and the first page that it grows into. Raises OutOfCapacity."""
        slot = self._cache.allocate()
        while not self._cache.reserve([slot], length + self._limits.max_depth + 1):
            if not self._prefixes.shed():
                self._cache.free(slot)
                raise OutOfCapacity(f"no memory is left for the cache of {length} positions")
        return slot

    def release(self, sequence_ids: Rows[str]) -> int:
        """Free these sequences; unknown ids are none of our business. Returns how many there were."""
        freed = self._free(sequence_ids)
        for sequence in freed:
            if sequence.started is None:
                self.refuse(sequence.id, sequence.reply, UnknownSequence(f"sequence {sequence.id} has been released"))
        return len(freed)

    def release_own(self, gateway: str, sequence_ids: Rows[str]) -> int:
        """Free these of a gateway's own: others' are none of its business. Returns how many there were."""
        known = [self.sequences[i] for i in sequence_ids if i in self.sequences]
        if others := sum(sequence.gateway != gateway for sequence in known):
            log.warning("refused to release what is another gateway's", gateway=gateway, sequences=others)
        return self.release([sequence.id for sequence in known if sequence.gateway == gateway])

    def _free(self, sequence_ids: Rows[str]) -> list[Sequence]:
        known = [i for i in dict.fromkeys(sequence_ids) if i in self.sequences]
        freed = [self.sequences.pop(sequence_id) for sequence_id in known]
        for sequence in freed:
            held = 0 if sequence.poisoned else self._cache.lengths[sequence.slot]
            self._prefixes.end(sequence.slot, sequence.tokens[:held])
            self._pipeline.release(sequence.slot)
            self._cache.free(sequence.slot, scrub=sequence.poisoned)
            if sequence.started is None:
                self._prompts.remove(sequence)
            log.debug("sequence ends", sequence=sequence.id, rounds=sequence.round)
        self._publisher.end(known)
        self._measure()
        return freed

    def refusal(self, sequence_id: str, error: SpireError) -> tensor_pb2.ItemStatus:
        """What is answered to an item that cannot be served; counted and logged."""
        status = item_status(error)
        code = code_name(status.code)
        self._metrics.refused.labels(code).inc()
        log.debug("refused", sequence=sequence_id, code=code)
        return status

    def refuse(self, sequence_id: str, reply: Reply, error: SpireError) -> None:
        """Answer a Start that comes to nothing."""
        status = self.refusal(sequence_id, error)
        reply(pb.RoundsResponse(started=pb.Started(sequence_id=sequence_id, status=status)))

    def fail_start(self, sequence: Sequence, error: SpireError) -> None:
        """The same of a sequence that was admitted already."""
        self._free([sequence.id])
        self.refuse(sequence.id, sequence.reply, error)

    def preempt_youngest(self) -> Sequence:
        """Let the sequence that was admitted last start again when there is memory."""
        youngest = list(self.sequences.values())[-1]
        self._metrics.preempted.inc()
        if youngest.started is None:
            self.fail_start(youngest, OutOfCapacity("no memory is left for its cache"))
        else:
            self.release([youngest.id])
        return youngest

    def release_gateway(self, gateway: str) -> int:
        """Free what a gateway left behind."""
        count = self.release([s.id for s in self.sequences.values() if s.gateway == gateway])
        self._metrics.expired.inc(count)
        return count

    def held(self, sequence_id: str, gateway: str) -> Sequence:
        """A gateway's own. Raises UnknownSequence."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence.gateway != gateway:
            raise UnknownSequence(f"sequence {sequence_id} is not held here: start it again from its tokens")
        return sequence

    def _measure(self) -> None:
        self._metrics.slots_used.set(len(self.sequences))
