"""Who holds which slot: sequences from admission to release, and all that is kept for them by slot.

Who finds no room waits for it. Gateways share it: the next one is of whichever holds the fewest, and the youngest of
whoever holds the most gives way to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import structlog
import torch

from spire.errors import InvalidRequest, SpireError, UnknownSequence
from spire.rpc.errors import code_name, item_status
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.activations import Publisher
from verifier_service.batch import Limits
from verifier_service.metrics import VerifierMetrics
from verifier_service.prefixes import Prefixes
from verifier_service.prompts import Prompts
from verifier_service.sequence import LEAST_RUN, Reply, Sequence, check_start, preempted
from verifier_service.step import ModelSteps
from verifier_service.tasks import StartTask
from verifier_service.waiting import Waiting

log = structlog.get_logger("verifier_service")
# Sequences that had to give way whose gateways have not asked for them since.
_MOST_PREEMPTED = 4096


class Slots:
    """The sequences that are held, in order of admission, and those that wait for room."""

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
        self.waiting = Waiting(self._cache.slots)
        # Those that came since the last time, and whether anything came or went: else there is no more room than then.
        self._new: list[str] = []
        self._changed = False
        # By sequence id, the gateway.
        self._preempted: dict[str, str] = {}

    def admit(self, task: StartTask) -> None:
        """Begin a sequence once there is room. Raises InvalidRequest, or OutOfCapacity where too many wait already."""
        check_start(task.start, self._limits.vocab_size, self._limits.max_context)
        if task.start.adjustments.HasField("grammar") and task.matcher is None:
            raise InvalidRequest("grammars are not available at this verifier", "grammar")
        self.waiting.add(task)
        self._new.append(task.start.sequence_id)
        self._changed = True

    @property
    def may_admit(self) -> bool:
        """Whether any that waits may have room by now."""
        return bool(self.waiting) and self._changed

    def admit_waiting(self) -> None:
        """Begin those that wait as long as there is room; who holds too much gives way. Call it between two steps."""
        while self.waiting and (task := self.waiting.next(self._held())):
            slot = self._slot_for(len(task.start.tokens)) if self._changed else None
            if slot is not None:
                self.waiting.remove(task.start.sequence_id)
                self._begin(task, slot)
            elif victim := self._beyond_share(task.gateway):
                self.preempt(victim)
            else:
                break
        self._changed = False
        for task in filter(None, map(self.waiting.get, self._new)):
            task.stands(pb.STAGE_WAITING)
        self._new.clear()

    def _held(self) -> Counter[str]:
        return Counter(sequence.gateway for sequence in self.sequences.values())

    def _beyond_share(self, gateway: str) -> Sequence | None:
        """The youngest of whoever holds the most, if what this gateway waits for makes their shares more equal."""
        held = self._held()
        largest = max(held, key=held.__getitem__, default=gateway)
        if held[largest] < held[gateway] + 2:
            return None
        theirs = [s for s in self.sequences.values() if s.gateway == largest and s.may_give_way]
        return theirs[-1] if theirs else None

    def _begin(self, task: StartTask, slot: int) -> None:
        start = task.start
        self._preempted.pop(start.sequence_id, None)
        self._prefixes.begin(slot, start.tokens, start.cache_salt)
        prompt_L = torch.tensor(list(start.tokens))
        sequence = Sequence(start, slot, task.gateway, task.reply, task.tell, prompt_L, task.received)
        self._pipeline.assign(slot, start, task.matcher)
        self.sequences[sequence.id] = sequence
        self._prompts.add(sequence)
        self._publisher.join(sequence.id, sequence.draft_id, slot)
        self._measure()
        if start.sequence_id not in self._new:
            task.stands(pb.STAGE_ADMITTED)
        log.debug("sequence begins", sequence=sequence.id, tokens=len(start.tokens), draft_id=sequence.draft_id)

    def _slot_for(self, length: int) -> int | None:
        """A slot with memory for a prompt and what it runs for at least, beside what everybody else runs for."""
        if not self._cache.free_slots:
            return None
        slot, run = self._cache.allocate(), LEAST_RUN + self._limits.max_depth
        live = [sequence.slot for sequence in self.sequences.values()]
        while not (self._cache.reserve(live, run) and self._cache.reserve([slot], length + run)):
            if not self._prefixes.shed():
                self._cache.free(slot)
                return None
        return slot

    def release(self, sequence_ids: Rows[str]) -> int:
        """Free these sequences; unknown ids are none of our business. Returns how many there were."""
        for sequence_id in sequence_ids:
            self._preempted.pop(sequence_id, None)
        withdrawn = list(filter(None, map(self.waiting.remove, sequence_ids)))
        freed = self._free(sequence_ids)
        unanswered = [(task.start.sequence_id, task.reply) for task in withdrawn]
        unanswered += [(sequence.id, sequence.reply) for sequence in freed if sequence.started is None]
        for sequence_id, reply in unanswered:
            self.refuse(sequence_id, reply, UnknownSequence(f"sequence {sequence_id} has been released"))
        self._changed = self._changed or bool(withdrawn)
        return len(withdrawn) + len(freed)

    def release_own(self, gateway: str, sequence_ids: Rows[str]) -> int:
        """Free these of a gateway's own: others' are none of its business. Returns how many there were."""
        whose = {sequence_id: self._gateway_of(sequence_id) for sequence_id in sequence_ids}
        if others := sum(known not in (gateway, None) for known in whose.values()):
            log.warning("refused to release what is another gateway's", gateway=gateway, sequences=others)
        return self.release([sequence_id for sequence_id, known in whose.items() if known == gateway])

    def _gateway_of(self, sequence_id: str) -> str | None:
        """Whose it is, held, waiting or preempted; None for what is not known."""
        known = self.sequences.get(sequence_id) or self.waiting.get(sequence_id)
        return known.gateway if known else self._preempted.get(sequence_id)

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
        self._changed = self._changed or bool(freed)
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
        """Let one start again when there is memory: the youngest but those that have just come back, and the oldest
        only where there is no other."""
        by_age = list(self.sequences.values())
        victim = next((s for s in reversed(by_age[1:]) if s.may_give_way), by_age[-1])
        self.preempt(victim)
        return victim

    def preempt(self, sequence: Sequence) -> None:
        """Free what it holds. Its gateway is told when it asks for it, or now where it waits for the first token."""
        self._metrics.preempted.inc()
        if sequence.started is None:
            self.fail_start(sequence, preempted(sequence.id))
        else:
            self._free([sequence.id])
            self._preempted[sequence.id] = sequence.gateway
            if len(self._preempted) > _MOST_PREEMPTED:
                del self._preempted[next(iter(self._preempted))]

    def release_gateway(self, gateway: str) -> int:
        """Free what a gateway left behind."""
        waiting = [task.start.sequence_id for task in self.waiting if task.gateway == gateway]
        count = self.release([*waiting, *(s.id for s in self.sequences.values() if s.gateway == gateway)])
        self._metrics.expired.inc(count)
        return count

    def held(self, sequence_id: str, gateway: str) -> Sequence:
        """A gateway's own. Raises UnknownSequence, or OutOfCapacity when it had to give way."""
        if self._preempted.get(sequence_id) == gateway:
            raise preempted(sequence_id)
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence.gateway != gateway:
            raise UnknownSequence(f"sequence {sequence_id} is not held here: start it again from its tokens")
        return sequence

    def _measure(self) -> None:
        self._metrics.slots_used.set(len(self.sequences))
