"""Blocks that wait for verification: choosing the blocks of a step, and answering their items.

Every item of every batch is answered: with its result, with the stored result if it is a repeat, or with an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import structlog

from spire.errors import InvalidRequest, RequestError, SpireError
from spire.lost_device import end_if_device_lost
from spire.rpc.carrier import OverwritingRingReader
from spire.rpc.errors import OK
from spire.v1 import verifier_pb2 as pb
from verifier_service.engine.batch import Block, Item, Limits, RaggedBatch, pad, q_problems, read_block
from verifier_service.engine.draft_requests import DraftRequests
from verifier_service.engine.prefixes import Prefixes
from verifier_service.engine.sequence import not_finite, preempted, step_failed
from verifier_service.engine.slots import Slots
from verifier_service.engine.step import ModelSteps, Outcome
from verifier_service.engine.tasks import VerifyTask
from verifier_service.metrics import VerifierMetrics

log = structlog.get_logger("verifier_service")


@dataclass(slots=True)
class Entry:
    """A block, and the batch and item that it was read from."""

    block: Block
    task: VerifyTask
    item: Item


@dataclass(frozen=True)
class StepWork:
    """The batches that a step answers, and those of their blocks that it runs, in order of slots.

    `q_seconds`: time spent on reading and checking q.
    """

    tasks: Rows[VerifyTask] = ()
    entries: Rows[Entry] = ()
    batch: RaggedBatch | None = None
    q_seconds: float = 0.0

    @property
    def positions(self) -> int:
        """The number of positions in the forward, padding included."""
        return self.batch.tokens_BT.numel() if self.batch else 0

    @property
    def drafted(self) -> bool:
        """True if any block has draft tokens."""
        return any(entry.block.k for entry in self.entries)

    def answer(self, outcome: Outcome | None, began: float, over: float, cache_usage: float) -> None:
        """Send the answer of every batch. `began`, `over`: start and end of the step on `time.perf_counter`'s clock."""
        for task in self.tasks:
            # Filled in place: a message that is built from other messages copies them.
            response = pb.RoundsResponse()
            result, timings = response.verified, response.verified.timings
            result.batch_id, result.cache_usage, result.over_at = task.batch.batch_id, cache_usage, over
            result.results.extend([task.results[item.index] for item in task.items])
            for answered in result.results if task.undrafted else ():
                answered.undrafted = task.undrafted.get(answered.sequence_id, pb.UNDRAFTED_UNSPECIFIED)
            timings.queue_seconds = began - task.received - task.drafting_seconds
            timings.total_seconds = time.perf_counter() - began
            if outcome:
                timings.forward_seconds = outcome.forward_seconds
                timings.sample_seconds = self.q_seconds + outcome.sample_seconds
            if task.drafting_seconds:
                result.drafting.CopyFrom(task.drafting)
            task.reply(response)


class Blocks:
    """The batches that wait for verification. `q_rings`: by draft id, the ring that a draft on this host writes to."""

    def __init__(
        self,
        steps: ModelSteps,
        slots: Slots,
        prefixes: Prefixes,
        limits: Limits,
        metrics: VerifierMetrics,
        q_rings: Mapping[str, OverwritingRingReader],
        draft_requests: DraftRequests,
    ):
        self._steps, self._slots, self._prefixes, self._q_rings = steps, slots, prefixes, q_rings
        self._limits, self._metrics = limits, metrics
        self._draft_requests = draft_requests
        self._waiting: list[VerifyTask] = []

    @property
    def ready(self) -> bool:
        """True if any batch can be verified now."""
        return any(task.asked and not task.awaited for task in self._waiting)

    def add(self, task: VerifyTask) -> None:
        self._waiting.append(task)

    def ask(self) -> bool:
        """Place the draft requests of each batch that shares no sequence with an earlier one. True if there was any."""
        seen, any_asked = set[str](), False
        for task in self._waiting:
            if not task.asked and seen.isdisjoint(task.sequence_ids):
                task.asked = any_asked = True
                self._draft_requests.place(task)
            seen |= task.sequence_ids
        return any_asked

    # --- before the step ------------------------------------------------------------------------------------------

    def take(self) -> StepWork:
        """Return the work of the next step. An item that cannot be run gets an error in its batch's answer."""
        tasks = self._batches()
        try:
            entries = self._with_room(self._admissible(tasks))
            began = time.perf_counter()
            return StepWork(tasks, *self._with_sound_q(entries), time.perf_counter() - began)
        except Exception as error:
            end_if_device_lost(error)
            log.exception("batches could not be taken", batches=len(tasks))
            self._give_up_rest(tasks)
            return StepWork(tasks)

    def _batches(self) -> list[VerifyTask]:
        """Take the batches that await no draft, except those that need the outcome of an earlier block."""
        tasks: list[VerifyTask] = []
        later: list[VerifyTask] = []
        seen: set[str] = set()
        for task in self._waiting:
            free = task.asked and not task.awaited and seen.isdisjoint(task.sequence_ids)
            (tasks if free else later).append(task)
            seen |= task.sequence_ids
        self._waiting = later
        return tasks

    def _admissible(self, tasks: Rows[VerifyTask]) -> list[Entry]:
        """Return the blocks to verify, by slot. Repeats get their stored answer, invalid items an error."""
        entries: list[Entry] = []
        seen: set[str] = set()
        for task in tasks:
            for item in task.items:
                try:
                    if item.sequence_id in seen:
                        raise InvalidRequest(f"sequence {item.sequence_id} is in this batch twice")
                    seen.add(item.sequence_id)
                    block = self._read(item, task)
                    if isinstance(block, Block):
                        entries.append(Entry(block, task, item))
                    else:
                        task.results[item.index] = block
                except RequestError as error:
                    self._refuse(task, item, error)
        return sorted(entries, key=lambda entry: entry.block.sequence.slot)

    def _read(self, item: Item, task: VerifyTask) -> Block | pb.VerifyResult:
        sequence = self._slots.held(item.sequence_id, task.gateway)
        base = self._steps.cache.lengths[sequence.slot]
        if stored := sequence.stored_answer(item.round, item.base, base):
            return stored
        q_ring = self._q_rings.get(sequence.draft_id)
        try:
            return read_block(item, sequence, base, self._limits, q_ring)
        except InvalidRequest:
            if not item.k:
                raise
            # The draft's fault, not the gateway's.
            task.undrafted[item.sequence_id] = pb.UNDRAFTED_ERROR
            item.tokens = []
            return read_block(item, sequence, base, self._limits, q_ring)

    def _with_room(self, entries: list[Entry]) -> list[Entry]:
        """Reserve memory for the new positions, preempting sequences if needed; return the entries that are left."""
        while entries:
            slots = [entry.block.sequence.slot for entry in entries]
            new_tokens = 1 + max(entry.block.k for entry in entries)
            if self._steps.cache.reserve(slots, new_tokens):
                break
            if self._prefixes.shed():
                continue
            victim = self._slots.preempt_youngest()
            for entry in entries:
                if entry.block.sequence is victim:
                    self._refuse(entry.task, entry.item, preempted(victim.id))
            entries = [entry for entry in entries if entry.block.sequence is not victim]
        return entries

    def _with_sound_q(self, entries: list[Entry]) -> tuple[list[Entry], RaggedBatch | None]:
        """Empty or refuse the blocks whose q cannot be used; return the entries that are left and their batch."""
        if not entries:
            return [], None
        batch = pad([entry.block for entry in entries], self._steps.device)
        if not all(entry.block.has_its_q for entry in entries):
            entries = [e if e.block.has_its_q else replace(e, block=e.block.without_tokens()) for e in entries]
            return self._with_sound_q(entries)
        problems = q_problems(batch, self._limits.vocab_size)
        if not any(problems):
            return entries, batch
        sound = [self._without_bad_q(*pair) if pair[1] else pair[0] for pair in zip(entries, problems, strict=True)]
        return self._with_sound_q([entry for entry in sound if entry])

    def _without_bad_q(self, entry: Entry, problem: str) -> Entry | None:
        """Replace the block by an empty one if its q came from a draft; refuse the item if q came from the gateway."""
        if not entry.item.k:
            self._refuse(entry.task, entry.item, InvalidRequest(problem))
            return None
        entry.task.undrafted[entry.item.sequence_id] = pb.UNDRAFTED_ERROR
        return replace(entry, block=entry.block.without_tokens())

    def _give_up_rest(self, tasks: Rows[VerifyTask]) -> None:
        """Give up every item that has no answer yet."""
        for task in tasks:
            for item in task.items:
                if item.index not in task.results:
                    self._give_up(task, item)

    def _give_up(self, task: VerifyTask, item: Item) -> None:
        """Refuse the item and release its sequence, to be started again: a failed step leaves its state uncertain."""
        self._refuse(task, item, step_failed(item.sequence_id))
        self._slots.release_own(task.gateway, [item.sequence_id])

    def _refuse(self, task: VerifyTask, item: Item, error: SpireError) -> None:
        status = self._slots.refusal(item.sequence_id, error)
        task.results[item.index] = pb.VerifyResult(sequence_id=item.sequence_id, round=item.round, status=status)

    # --- after the step -------------------------------------------------------------------------------------------

    def conclude(self, work: StepWork, outcome: Outcome) -> None:
        """Advance every sequence whose block was verified."""
        for row, entry in enumerate(work.entries):
            if outcome.sound(row):
                entry.block.sequence.advance(entry.block.round, entry.block.base, outcome.tokens[row])

    def write_answers(self, work: StepWork, outcome: Outcome) -> None:
        """Write the answer of each block. Separate from `conclude`: drafts are asked for the next round in between."""
        for row, entry in enumerate(work.entries):
            self._write_answer(entry, outcome, row)

    def count(self, work: StepWork, outcome: Outcome) -> None:
        """Count the step in the metrics."""
        if work.batch:
            drafted = sum(work.batch.counts)
            self._metrics.step("verify", drafted + len(work.batch.counts), outcome.seconds)
            self._metrics.tokens.inc(sum(len(tokens) for tokens in outcome.tokens))
            self._metrics.draft_tokens.inc(drafted)
            self._metrics.accepted_tokens.inc(sum(outcome.accepted))

    def fail(self, work: StepWork) -> None:
        """Give up every item of a failed step."""
        for entry in work.entries:
            self._give_up(entry.task, entry.item)

    def _write_answer(self, entry: Entry, outcome: Outcome, row: int) -> None:
        sequence, block = entry.block.sequence, entry.block
        if not outcome.finite[row]:
            sequence.poisoned = True
            self._refuse(entry.task, entry.item, not_finite(sequence))
            return
        if refusal := outcome.refused[row]:
            self._refuse(entry.task, entry.item, refusal)
            return
        answer = pb.VerifyResult(
            sequence_id=sequence.id,
            round=block.round,
            status=OK,
            accepted=outcome.accepted[row],
            drafted=block.k,
            tokens=outcome.tokens[row],
            logprobs=outcome.logprobs[row],
        )
        sequence.last_answer = answer
        entry.task.results[entry.item.index] = answer
