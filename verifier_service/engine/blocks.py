"""Blocks that wait for verification: choosing the blocks of a step, and answering their items.

Every item of every batch is answered: with its result, the stored result if the item is a repeat, or an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Rows
from typing import NamedTuple

import structlog

from spire.errors import InvalidRequest, RequestError, SpireError
from spire.lost_device import end_if_device_lost
from spire.rpc.carrier import OverwritingRingReader
from spire.rpc.errors import OK
from spire.v1 import verifier_pb2 as pb
from verifier_service.engine.batch import Block, Item, Limits, RaggedBatch, VerifyTask, pad, q_problems
from verifier_service.engine.draft_requests import DraftRequests
from verifier_service.engine.prefixes import Prefixes
from verifier_service.engine.sequence import HeldSequence, not_finite, preempted, step_failed
from verifier_service.engine.slots import Slots
from verifier_service.engine.step import ModelSteps, Outcome
from verifier_service.metrics import VerifierMetrics

log = structlog.get_logger("verifier_service")


class StepWork(NamedTuple):
    """The batches that a step answers, and the blocks of these batches that the step verifies, as one batch.

    `q_seconds`: time spent on reading and checking q.
    """

    tasks: Rows[VerifyTask] = ()
    blocks: Rows[Block] = ()
    batch: RaggedBatch | None = None
    q_seconds: float = 0.0

    @property
    def positions(self) -> int:
        """The number of positions in the forward, padding included."""
        return self.batch.positions if self.batch else 0

    @property
    def drafted(self) -> bool:
        """True if any block has draft tokens."""
        return any(block.k for block in self.blocks)


class Blocks:
    """The batches that wait for verification. `q_rings`: by draft id, the ring to which a local draft writes its q."""

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
        """True if any batch awaits no draft reply and can be verified now."""
        return any(task.asked and not task.awaited for task in self._waiting)

    def add(self, task: VerifyTask) -> None:
        self._waiting.append(task)

    def ask(self) -> bool:
        """Request drafts for batches without sequences of earlier batches. Return False if no batch was eligible."""
        seen, any_asked = set[str](), False
        for task in self._waiting:
            if not task.asked and seen.isdisjoint(task.sequence_ids):
                task.asked = any_asked = True
                self._draft_requests.place(task)
            seen |= task.sequence_ids
        return any_asked

    def take(self) -> StepWork:
        """Return the work of the next step. An item that cannot be verified is answered with an error."""
        tasks = self._batches()
        try:
            blocks = self._with_room(self._admissible(tasks))
            began = time.perf_counter()
            return StepWork(tasks, *self._with_sound_q(blocks), time.perf_counter() - began)
        except Exception as error:
            end_if_device_lost(error)
            log.exception("batches could not be taken", batches=len(tasks))
            for task in tasks:
                for item in task.items:
                    if item.result is None:
                        self._give_up(task, item)
            return StepWork(tasks)

    def _batches(self) -> list[VerifyTask]:
        """Dequeue the batches that await no draft reply and share no sequence with an earlier batch."""
        tasks, later, seen = list[VerifyTask](), list[VerifyTask](), set[str]()
        for task in self._waiting:
            free = task.asked and not task.awaited and seen.isdisjoint(task.sequence_ids)
            (tasks if free else later).append(task)
            seen |= task.sequence_ids
        self._waiting = later
        return tasks

    def _admissible(self, tasks: Rows[VerifyTask]) -> list[Block]:
        """Return the blocks to verify. Repeated items get their stored result, invalid items an error."""
        blocks, seen = list[Block](), set[str]()
        for task in tasks:
            for item in task.items:
                try:
                    if item.sequence_id in seen:
                        raise InvalidRequest(f"sequence {item.sequence_id} is in this batch twice")
                    seen.add(item.sequence_id)
                    sequence = self._slots.held(item.sequence_id, task.gateway)
                    base = self._steps.cache.lengths[sequence.slot]
                    item.result = sequence.stored_answer(item.round, item.base, base)
                    if item.result is None:
                        blocks.append(self._read(task, item, sequence, base))
                except RequestError as error:
                    self._refuse(item, error)
        return blocks

    def _read(self, task: VerifyTask, item: Item, sequence: HeldSequence, base: int) -> Block:
        try:
            return self._checked(task, item, sequence, base)
        except InvalidRequest:
            if not item.k:
                raise
            # The draft caused the error, not the gateway.
            item.undrafted, item.tokens = pb.UNDRAFTED_ERROR, []
            return self._checked(task, item, sequence, base)

    def _checked(self, task: VerifyTask, item: Item, sequence: HeldSequence, base: int) -> Block:
        """Check an item and return its block, without draft tokens if q has been overwritten. Raises InvalidRequest."""
        k, limits = len(item.tokens), self._limits
        if k > limits.max_depth:
            raise InvalidRequest(f"{k} draft tokens came, at most {limits.max_depth} are taken")
        if base + k + 1 > limits.max_context:
            raise InvalidRequest(f"positions up to {base + k} do not fit the context of {limits.max_context}")
        if k and (largest := max(item.tokens)) >= limits.vocab_size:
            raise InvalidRequest(f"draft token {largest} is outside the vocabulary of {limits.vocab_size}")
        if k == 0 or not sequence.needs_q:
            return Block(sequence, base, task, item, item.tokens)
        if item.q is None:
            raise InvalidRequest("q is missing: a sampled sequence needs what its draft tokens were drawn from")
        q = item.q(k, limits.vocab_size, self._q_rings.get(sequence.draft_id))
        return Block(sequence, base, task, item, item.tokens if q else [], q)

    def _with_room(self, blocks: list[Block]) -> list[Block]:
        """Reserve the blocks' memory, preempting sequences if needed; return the blocks of sequences that remain."""
        while blocks:
            slots = [block.sequence.slot for block in blocks]
            new_tokens = 1 + max(block.k for block in blocks)
            if self._steps.cache.reserve(slots, new_tokens):
                break
            if self._prefixes.shed():
                continue
            victim = self._slots.preempt_youngest()
            for block in blocks:
                if block.sequence is victim:
                    self._refuse(block.item, preempted(victim.id))
            blocks = [block for block in blocks if block.sequence is not victim]
        return blocks

    def _with_sound_q(self, blocks: list[Block]) -> tuple[list[Block], RaggedBatch | None]:
        """Drop draft tokens of unusable q; refuse items if gateways sent them. Return the other blocks as a batch."""
        if not blocks:
            return [], None
        # On a CPU by depth: consecutive blocks of one depth are computed together. Elsewhere the order stays the same
        # from step to step, so that sampling parameters that lie on the device are used again.
        by_depth = self._steps.device.type == "cpu"
        blocks = sorted(blocks, key=lambda block: (block.k if by_depth else 0, block.sequence.slot))
        batch = pad(blocks, self._steps.device)
        # Waits for a GPU: only then has it read q.
        problems = q_problems(batch, self._limits.vocab_size)
        overwritten = [block for block in blocks if block.q and not block.q.holds]
        for block in overwritten:
            block.empty()
        if overwritten:
            return self._with_sound_q(blocks)
        if not any(problems):
            return blocks, batch
        for block, problem in zip(blocks, problems, strict=True):
            if problem and block.item.k:  # the draft caused the error, not the gateway
                block.item.undrafted = pb.UNDRAFTED_ERROR
                block.empty()
            elif problem:
                self._refuse(block.item, InvalidRequest(problem))
        return self._with_sound_q([block for block in blocks if block.item.result is None])

    def _give_up(self, task: VerifyTask, item: Item) -> None:
        """Refuse the item and release its sequence, whose state is uncertain after a failed step."""
        self._refuse(item, step_failed(item.sequence_id))
        self._slots.release_own(task.gateway, [item.sequence_id])

    def _refuse(self, item: Item, error: SpireError) -> None:
        status = self._slots.refusal(item.sequence_id, error)
        item.result = pb.VerifyResult(sequence_id=item.sequence_id, round=item.round, status=status)

    def conclude(self, work: StepWork, outcome: Outcome) -> None:
        """Append the new tokens of every verified block to its sequence."""
        for row, block in enumerate(work.blocks):
            if outcome.sound(row):
                block.sequence.advance(block.item.round, block.base, outcome.tokens[row])

    def answer(self, work: StepWork, outcome: Outcome | None, began: float, over: float) -> None:
        """Answer every batch and update the metrics. Draft requests may be sent between `conclude` and `answer`.

        `began`, `over`: start and end of the step on `time.perf_counter`'s clock.
        """
        if outcome:
            for row, block in enumerate(work.blocks):
                self._write_answer(block, outcome, row)
            self._metrics.step("verify", sum(block.k + 1 for block in work.blocks), outcome.seconds)
            sound = [row for row in range(len(work.blocks)) if outcome.sound(row)]
            self._metrics.tokens.inc(sum(len(outcome.tokens[row]) for row in sound))
            self._metrics.draft_tokens.inc(sum(work.blocks[row].k for row in sound))
            self._metrics.accepted_tokens.inc(sum(outcome.accepted[row] for row in sound))
        cache_usage = self._steps.cache.usage
        for task in work.tasks:
            # Filled in place: a message that is built from other messages copies them.
            response = pb.RoundsResponse()
            result, timings = response.verified, response.verified.timings
            result.batch_id, result.cache_usage, result.over_at = task.batch.batch_id, cache_usage, over
            result.results.extend([item.result for item in task.items if item.result])
            for item, answered in zip(task.items, result.results, strict=True):
                if item.undrafted:
                    answered.undrafted = item.undrafted
            timings.queue_seconds = began - task.received - task.drafting_seconds
            timings.total_seconds = time.perf_counter() - began
            if outcome:
                timings.forward_seconds = outcome.forward_seconds
                timings.sample_seconds = work.q_seconds + outcome.sample_seconds
            if task.drafting_seconds:
                result.drafting.CopyFrom(task.drafting)
            task.reply(response)

    def fail(self, work: StepWork) -> None:
        """Refuse every item of a failed step and release the items' sequences."""
        for block in work.blocks:
            self._give_up(block.task, block.item)

    def _write_answer(self, block: Block, outcome: Outcome, row: int) -> None:
        sequence, item = block.sequence, block.item
        if not outcome.finite[row]:
            sequence.poisoned = True
            self._refuse(item, not_finite(sequence))
        elif refusal := outcome.refused[row]:
            self._refuse(item, refusal)
        else:
            sequence.last_answer = item.result = pb.VerifyResult(
                sequence_id=sequence.id,
                round=item.round,
                status=OK,
                accepted=outcome.accepted[row],
                drafted=block.k,
                tokens=outcome.tokens[row],
                logprobs=outcome.logprobs[row],
            )
