"""The assignment of slots to sequences, from admission to release, and of all state that is kept by slot.

A Start waits until a slot and memory are free. Gateways share slots and memory: the gateway with the fewest sequences
is served first, and the youngest sequence of the gateway with the most sequences is preempted for that gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import structlog
import torch

from spire.errors import InvalidRequest, OutOfCapacity, SpireError, UnknownSequence
from spire.rpc.errors import code_name, item_status
from spire.v1 import tensor_pb2, verifier_pb2 as pb
from verifier_service.engine.batch import Limits
from verifier_service.engine.prefixes import Prefixes
from verifier_service.engine.prompts import Prompts
from verifier_service.engine.sequence import LEAST_RUN, HeldSequence, Reply, StartTask, check_start, preempted
from verifier_service.engine.step import ModelSteps
from verifier_service.feed.publisher import Publisher
from verifier_service.metrics import VerifierMetrics

log = structlog.get_logger("verifier_service")
# The most preempted sequences to remember until they are started again or released.
_MOST_PREEMPTED = 4096


class Waiting(dict[str, StartTask]):
    """The Starts that wait for a slot and memory, by sequence id, oldest first; at most `most` of each gateway.

    `most` is the number of slots: a gateway has no use for more.
    """

    def __init__(self, most: int):
        self._most = most

    def add(self, task: StartTask) -> None:
        """Append a Start. Raises OutOfCapacity if the maximum number of Starts of its gateway already waits."""
        if sum(other.gateway == task.gateway for other in self.values()) >= self._most:
            raise OutOfCapacity(f"{self._most} sequences of this gateway wait for room already: that is the most")
        self[task.start.sequence_id] = task

    def next(self, held: Counter[str]) -> StartTask | None:
        """Return the oldest Start of the gateway with the fewest sequences; shorter Starts must not overtake it."""
        return min(self.values(), key=lambda task: held[task.gateway], default=None)


class Slots:
    """The sequences that have slots, in order of admission, and the Starts that wait for a slot and memory."""

    def __init__(
        self,
        steps: ModelSteps,
        publisher: Publisher,
        prefixes: Prefixes,
        prompts: Prompts,
        limits: Limits,
        metrics: VerifierMetrics,
    ):
        self.sequences: dict[str, HeldSequence] = {}
        self._cache, self._pipeline = steps.cache, steps.pipeline
        self._publisher, self._prefixes, self._prompts = publisher, prefixes, prompts
        self._limits, self._metrics = limits, metrics
        self.waiting = Waiting(self._cache.slots)
        # Starts since the last `admit_waiting`; True if a Start or sequence came or went since: else none has room.
        self._new: list[str] = []
        self._changed = False
        # sequence id -> gateway
        self._preempted: dict[str, str] = {}

    def admit(self, task: StartTask) -> None:
        """Check and queue a Start. Raises InvalidRequest, or OutOfCapacity if too many of its gateway's Starts wait."""
        check_start(task.start, self._limits.vocab_size, self._limits.max_context)
        if task.start.adjustments.HasField("grammar") and task.matcher is None:
            raise InvalidRequest("grammars are not available at this verifier", "grammar")
        self.waiting.add(task)
        self._new.append(task.start.sequence_id)
        self._changed = True

    @property
    def may_admit(self) -> bool:
        """True if Starts wait, and a Start has come or a sequence was freed since the last `admit_waiting`."""
        return bool(self.waiting) and self._changed

    def admit_waiting(self) -> None:
        """Admit Starts while slots and memory last; preempt gateways above their share. Call between two steps."""
        while self.waiting and (task := self.waiting.next(self._held())):
            slot = self._slot_for(len(task.start.tokens)) if self._changed else None
            if slot is not None:
                del self.waiting[task.start.sequence_id]
                self._begin(task, slot)
            elif victim := self._beyond_share(task.gateway):
                self.preempt(victim)
            else:
                break
        self._changed = False
        for sequence_id in self._new:
            if waits := self.waiting.get(sequence_id):
                waits.stands(pb.STAGE_WAITING)
        self._new.clear()

    def _held(self) -> Counter[str]:
        return Counter(sequence.gateway for sequence in self.sequences.values())

    def _beyond_share(self, gateway: str) -> HeldSequence | None:
        """Find the youngest preemptible sequence of the gateway with the most, if `gateway` has at least two fewer."""
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
        sequence = HeldSequence(start, slot, task.gateway, task.reply, task.tell, prompt_L, task.received)
        self._pipeline.assign(slot, start, task.matcher)
        self.sequences[sequence.id] = sequence
        self._prompts.add(sequence)
        self._publisher.join(sequence.id, sequence.draft_id, slot, sequence.tokens)
        self._metrics.slots_used.set(len(self.sequences))
        task.stands(pb.STAGE_ADMITTED)
        log.debug("sequence begins", sequence=sequence.id, tokens=len(start.tokens), draft_id=sequence.draft_id)

    def _slot_for(self, length: int) -> int | None:
        """Allocate a slot and memory for a prompt, its first tokens and all sequences' next tokens. None on failure."""
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
        """Free these sequences, including waiting ones; ignore unknown ids. Return the number of sequences freed."""
        for sequence_id in sequence_ids:
            self._preempted.pop(sequence_id, None)
        withdrawn = [task for sequence_id in sequence_ids if (task := self.waiting.pop(sequence_id, None))]
        freed = self._free(sequence_ids)
        unanswered = [(task.start.sequence_id, task.reply) for task in withdrawn]
        unanswered += [(sequence.id, sequence.reply) for sequence in freed if sequence.started is None]
        for sequence_id, reply in unanswered:
            self.refuse(sequence_id, reply, UnknownSequence(f"sequence {sequence_id} has been released"))
        self._changed = self._changed or bool(withdrawn)
        return len(withdrawn) + len(freed)

    def release_own(self, gateway: str, sequence_ids: Rows[str]) -> int:
        """Free the sequences that belong to this gateway, and ignore others. Return the number of sequences freed."""
        whose = {sequence_id: self._gateway_of(sequence_id) for sequence_id in sequence_ids}
        if others := sum(known not in (gateway, None) for known in whose.values()):
            log.warning("refused to release what is another gateway's", gateway=gateway, sequences=others)
        return self.release([sequence_id for sequence_id, known in whose.items() if known == gateway])

    def _gateway_of(self, sequence_id: str) -> str | None:
        """Return the gateway of a sequence, which may be waiting or preempted; None if the sequence is unknown."""
        known = self.sequences.get(sequence_id) or self.waiting.get(sequence_id)
        return known.gateway if known else self._preempted.get(sequence_id)

    def _free(self, sequence_ids: Rows[str]) -> list[HeldSequence]:
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
        self._metrics.slots_used.set(len(self.sequences))
        self._changed = self._changed or bool(freed)
        return freed

    def refusal(self, sequence_id: str, error: SpireError) -> tensor_pb2.ItemStatus:
        """Return the item status for this error; count and log the refusal."""
        status = item_status(error)
        code = code_name(status.code)
        self._metrics.refused.labels(code).inc()
        log.debug("refused", sequence=sequence_id, code=code)
        return status

    def refuse(self, sequence_id: str, reply: Reply, error: SpireError) -> None:
        """Answer a Start with an error."""
        status = self.refusal(sequence_id, error)
        reply(pb.RoundsResponse(started=pb.Started(sequence_id=sequence_id, status=status)))

    def fail_start(self, sequence: HeldSequence, error: SpireError) -> None:
        """Free an admitted sequence and answer its Start with an error."""
        self._free([sequence.id])
        self.refuse(sequence.id, sequence.reply, error)

    def preempt_youngest(self) -> HeldSequence:
        """Preempt and return the youngest preemptible sequence, else the youngest; the oldest only if it is alone."""
        by_age = list(self.sequences.values())
        victim = next((s for s in reversed(by_age[1:]) if s.may_give_way), by_age[-1])
        self.preempt(victim)
        return victim

    def preempt(self, sequence: HeldSequence) -> None:
        """Free a sequence. The answer to its next block, or to its Start during prefill, reports the preemption."""
        self._metrics.preempted.inc()
        if sequence.started is None:
            self.fail_start(sequence, preempted(sequence.id))
        else:
            self._free([sequence.id])
            self._preempted[sequence.id] = sequence.gateway
            if len(self._preempted) > _MOST_PREEMPTED:
                del self._preempted[next(iter(self._preempted))]

    def release_gateway(self, gateway: str) -> int:
        """Free all sequences of a lost gateway, including waiting ones. Return the number of sequences freed."""
        waiting = [sequence_id for sequence_id, task in self.waiting.items() if task.gateway == gateway]
        count = self.release([*waiting, *(s.id for s in self.sequences.values() if s.gateway == gateway)])
        self._metrics.expired.inc(count)
        return count

    def held(self, sequence_id: str, gateway: str) -> HeldSequence:
        """Return a sequence of this gateway. Raises OutOfCapacity if it was preempted, else UnknownSequence."""
        if self._preempted.get(sequence_id) == gateway:
            raise preempted(sequence_id)
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence.gateway != gateway:
            raise UnknownSequence(f"sequence {sequence_id} is not held here: start it again from its tokens")
        return sequence
