"""The engine: one thread that owns the target, its cache and every sequence. Other threads submit tasks to it.

A turn takes the tasks that have arrived, drafts with the target itself if requested, and runs one step: a single
forward over all waiting blocks (of all streams) and as many prompt tokens as the token budget allows. So decoding never
waits for more than one chunk of prompts. Without work, the thread waits for a task in its inbox.

When memory runs out, parked prefixes are dropped first, then the youngest sequence is preempted: its gateway starts it
again from its tokens, as after any loss. A Start for which slots or memory are lacking waits in `slots`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence as Rows
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog
import torch

from spire.errors import InvalidRequest, RequestError, StaleBlock
from spire.lost_device import end_if_device_lost
from spire.rpc.carrier import OverwritingRingReader
from spire.rpc.errors import OK
from spire.service.inbox import Inbox
from spire.service.pace import Pace
from spire.v1 import draft_pb2, verifier_pb2 as pb
from verifier_service.engine.batch import Block, Limits, VerifyTask
from verifier_service.engine.blocks import Blocks, StepWork
from verifier_service.engine.draft_requests import DraftRequests
from verifier_service.engine.prefixes import Prefixes
from verifier_service.engine.prompts import Prompts, TokenBudget
from verifier_service.engine.self_drafting import SelfDrafting
from verifier_service.engine.sequence import HeldSequence, StartTask, not_finite, standing, step_failed
from verifier_service.engine.slots import Slots
from verifier_service.engine.step import FIRST_POSITIONS, ModelSteps, Outcome, PromptChunk
from verifier_service.feed.delivery import Deliver
from verifier_service.feed.feed import Advance, Taps
from verifier_service.feed.publisher import FeedRows, Publisher
from verifier_service.metrics import VerifierMetrics
from verifier_service.sampling.logprobs import Scores

log = structlog.get_logger("verifier_service")
Result = TypeVar("Result")
Task = StartTask | VerifyTask | Callable[[], None]

# The most tasks that one turn takes, so that steps go on however many tasks arrive.
MOST_TAKEN = 256


class VerifierEngine:
    """The engine and its thread. After `start`, other threads call only `stop`, `submit`, `take_reply` and `call`."""

    def __init__(
        self,
        steps: ModelSteps,
        publisher: Publisher,
        prefixes: Prefixes,
        limits: Limits,
        metrics: VerifierMetrics,
        token_budget: int,
    ):
        self.steps, self.publisher, self.prefixes, self.metrics = steps, publisher, prefixes, metrics
        self.pace, self._budget = Pace(), TokenBudget(token_budget)
        self._prompts = Prompts(steps.cache, self._budget)
        # The number of prompt positions computed so far.
        self.prefilled = 0
        self.slots = Slots(steps, publisher, prefixes, self._prompts, limits, metrics)
        self.sequences = self.slots.sequences
        # By draft id. Set by the gRPC service, from the event loop's thread.
        self.q_rings: dict[str, OverwritingRingReader] = {}
        self._self_drafting = SelfDrafting(steps, self.sequences, metrics, self.pace)
        self.draft_requests = DraftRequests(self.sequences, limits, self.pace, self._self_drafting)
        self._blocks = Blocks(steps, self.slots, prefixes, limits, metrics, self.q_rings, self.draft_requests)
        self._inbox: Inbox[Task | None] = Inbox()
        # Tasks for the next turn that arrived during a step, when `_ask_ahead` took only the batches from the inbox.
        self._put_off: list[Task | None] = []
        self._stopping = False
        # Done when the thread has ended; carries the error if it died.
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="target-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after its current turn. The future `ended` completes once the thread has ended."""
        self._inbox.put(None)

    def submit(self, task: StartTask | VerifyTask) -> None:
        self._inbox.put(task)

    def take_reply(self, draft_id: str, reply: draft_pb2.DraftReply) -> None:
        """Queue a draft reply, which the engine's thread handles before the next step."""
        received = time.perf_counter()
        self._inbox.put(lambda: self.draft_requests.take(draft_id, reply, received))

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run `function` between two steps on the engine's thread and return a future of its result. For rare work."""
        done: Future[Result] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller has cancelled it, and setting the result of a cancelled future is an error
            try:
                done.set_result(function(*args))
            except Exception as error:
                end_if_device_lost(error)
                done.set_exception(error)

        self._inbox.put(run)
        return done

    def measure(self) -> None:
        """Time a step with a dummy prompt, so that even the first real step has a time limit. Call before `start`."""
        with self.pace.step("prompt", FIRST_POSITIONS):
            self.steps.take_first()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
            self.ended.set_result(None)
        except BaseException as error:
            end_if_device_lost(error)
            log.exception("the engine has died")
            self.ended.set_exception(error)

    def _turn(self) -> None:
        self._blocks.ask()
        arrived = self._arrived()
        self.pace.work()
        for task in arrived:
            self._accept(task)
        self.slots.admit_waiting()
        self.draft_requests.give_up_late()
        self._blocks.ask()
        self._self_drafting.draft()
        self._step()
        self.pace.rest()

    def _arrived(self) -> list[Task | None]:
        """Return at most MOST_TAKEN of the tasks that have arrived; wait for a task only if there is no other work."""
        tasks, self._put_off = self._put_off, []
        work = tasks or self._self_drafting or self._blocks.ready or self._prompts or self.slots.may_admit
        return tasks + self._inbox.take(MOST_TAKEN - len(tasks), 0 if work else self.draft_requests.patience)

    def _accept(self, task: Task | None) -> None:
        match task:
            case None:
                self._stopping = True
            case StartTask():
                self._accept_start(task)
            case VerifyTask():
                self._blocks.add(task)
            case _:
                task()

    def _accept_start(self, task: StartTask) -> None:
        try:
            sequence_id = task.start.sequence_id
            known, waits = self.sequences.get(sequence_id), self.slots.waiting.get(sequence_id)
            before = known or waits
            if before is None:
                self.slots.admit(task)
                return
            if before.start != task.start or before.gateway != task.gateway:
                raise InvalidRequest(f"sequence {sequence_id} is live with another Start")
            if known and known.started:
                task.reply(pb.RoundsResponse(started=known.started))
            else:
                again = StaleBlock(f"the Start of sequence {sequence_id} came again: that one will be answered")
                self.slots.refuse(sequence_id, before.reply, again)
            if known:
                known.reply, known.tell = task.reply, task.tell
            else:
                self.slots.waiting[sequence_id] = task  # sent by another stream; it keeps its position
        except RequestError as error:
            self.slots.refuse(task.start.sequence_id, task.reply, error)

    def _step(self) -> None:
        """Run one forward over all waiting batches and a chunk of prompts; send answers and publish activations."""
        began = time.perf_counter()
        work = self._blocks.take()
        for sequence in self._prompts.unseen(work.positions):
            self._reuse_prefix(sequence)
        chosen, chunk = self._prompts.next_chunk(work.positions)
        verified, prefilled = self._forward(work, chosen, chunk)
        over = time.perf_counter()
        if not work.drafted:
            self._blocks.answer(work, verified, began, over)
        shares = self._shares(work.blocks, verified)
        self._publish(lambda: self.publisher.announce(shares))
        if work.drafted:
            # Drafts absorb the activations while this thread asks them.
            self._ask_ahead()
        self._publish(lambda: self.publisher.store(shares))
        if work.drafted:
            # Answer last: where all processors are busy, the gateway would run now instead of this thread.
            self._blocks.answer(work, verified, began, over)
        if chunk and prefilled:
            self._advance_prompts(chosen, chunk, prefilled, began)

    def _ask_ahead(self) -> None:
        """During a step, send the draft requests of batches that wait already or, if none does, of those in the inbox.

        No sequence may be added or removed during a step, so tasks other than batches wait for the next turn.
        """
        if self._blocks.ask():
            return
        for task in self._inbox.take(MOST_TAKEN, 0):
            if isinstance(task, VerifyTask):
                self._blocks.add(task)
            else:
                self._put_off.append(task)
        self._blocks.ask()

    def _forward(
        self, work: StepWork, chosen: Rows[HeldSequence], chunk: PromptChunk | None
    ) -> tuple[Outcome | None, Outcome | None]:
        """Run the forward and advance its sequences. After a failure, answer with errors and release the sequences."""
        if not work.batch and not chunk:
            return None, None
        positions, began = work.positions + (sum(chunk.counts) if chunk else 0), time.perf_counter()
        try:
            with self.pace.step("prompt" if chunk else "verify", positions):
                verified, prefilled = self.steps.run(work.batch, chunk)
        except Exception as error:
            end_if_device_lost(error)
            log.exception("a step failed", blocks=len(work.blocks), prompts=len(chosen))
            self._blocks.fail(work)
            for sequence in chosen:
                self.slots.fail_start(sequence, step_failed(sequence.id))
            return None, None
        seconds = time.perf_counter() - began
        if verified:
            self._blocks.conclude(work, verified)
        if chunk and prefilled:
            self._budget.observe(positions, seconds)
            self.metrics.step("prefill", sum(chunk.counts), prefilled.seconds)
            self.prefilled += sum(chunk.counts)
        else:
            self._budget.observe_plain(seconds)
        return verified, prefilled

    def _shares(self, blocks: Rows[Block], outcome: Outcome | None) -> list[FeedRows]:
        if outcome is None:
            return []
        advances = [
            _advance(block.sequence, block.base, accepted + 1 if outcome.sound(row) else 0, block.item.paused)
            for row, (block, accepted) in enumerate(zip(blocks, outcome.accepted, strict=True))
        ]
        shares: list[FeedRows] = []
        self._publish(lambda: shares.extend(self.publisher.shares(advances, outcome.taps_BTND)))
        return shares

    def _reuse_prefix(self, sequence: HeldSequence) -> None:
        """Copy the longest prefix of the prompt that lies in another slot of the cache, instead of computing it.

        The last positions are always computed: the draft begins with their activations. It needs those of the sink too.
        Unless they are known, the sink is computed first, in a normal step's chunk; then this method is called again.
        """
        sink, last = self.publisher.needed(sequence.id, sequence.draft_id)
        prompt, computed = sequence.start.tokens, self.steps.cache.lengths[sequence.slot]
        if not sequence.before_copy:
            sequence.tell(standing(sequence.id, pb.STAGE_COMPUTED))
        donor, length = self.prefixes.longest(prompt[: max(0, len(prompt) - 1 - last)], sequence.start.cache_salt)
        if length <= max(sink, computed) or sequence.start.prompt_logprobs:  # logprobs need every position computed
            sequence.compared = True
        elif computed < sink:
            sequence.before_copy = sink
        else:
            sequence.compared = True
            self.steps.cache.copy(donor, sequence.slot, length)
            self._publish(lambda: self.publisher.skip(sequence.id, sequence.draft_id, length))
            sequence.cached_tokens = length
            self.metrics.cached_tokens.inc(length)

    def _advance_prompts(self, chosen: Rows[HeldSequence], chunk: PromptChunk, outcome: Outcome, began: float) -> None:
        """Store activations of the prefilled positions; answer the Starts that are complete or have failed."""
        ends = [self.steps.cache.lengths[sequence.slot] for sequence in chosen]
        advances = [
            _advance(sequence, end - count, count) if sound else _advance(sequence, end, 0)
            for sequence, end, count, sound in zip(chosen, ends, chunk.counts, outcome.finite, strict=True)
        ]
        self._publish(lambda: self.publisher.store(self.publisher.shares(advances, outcome.taps_BTND)))
        for row, sequence in sorted(enumerate(chosen), key=lambda pair: pair[1].received):
            _add_work(sequence, began, outcome)
            if not outcome.finite[row]:
                sequence.poisoned = True
                self.slots.fail_start(sequence, not_finite(sequence))
                continue
            if scores := outcome.scores[row]:
                sequence.scores.append(scores)
            if refusal := outcome.refused[row]:
                self.slots.fail_start(sequence, refusal)
            elif chunk.last[row]:
                self._finish_start(sequence, outcome.tokens[row][0], outcome.logprobs[row])

    def _finish_start(self, sequence: HeldSequence, token: int, logprobs: pb.Logprobs | None) -> None:
        base = self.steps.cache.lengths[sequence.slot]
        sequence.tokens.append(token)
        sequence.started = pb.Started(
            sequence_id=sequence.id,
            status=OK,
            base=base,
            token=token,
            timings=sequence.timings,
            cached_tokens=sequence.cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=Scores.join(sequence.scores).to_proto() if sequence.scores else None,
        )
        sequence.scores.clear()
        self._prompts.remove(sequence)
        self.metrics.tokens.inc()
        sequence.reply(pb.RoundsResponse(started=sequence.started))
        if sequence.draft_id:
            begin = self.publisher.pause if sequence.start.paused else self.publisher.replay
            self._publish(lambda: begin(sequence.draft_id, [sequence.id]))

    def subscribe(self, draft_id: str, taps: Taps, deliver: Deliver) -> None:
        self._publish(lambda: self.publisher.subscribe(draft_id, taps, deliver))
        self.steps.tapped_layers = self.publisher.layers

    def replay(self, draft_id: str, sequence_ids: Rows[str]) -> None:
        """Resend stored activations of these sequences to the draft."""
        self._publish(lambda: self.publisher.replay(draft_id, sequence_ids))

    def replay_all(self, draft_id: str, deliver: Deliver) -> None:
        self._publish(lambda: self.publisher.replay_all(draft_id, deliver))

    def _publish(self, publish: Callable[[], object]) -> None:
        """Call `publish` and only log its errors: missing activations cost draft tokens, never a sequence."""
        try:
            publish()
        except Exception as error:
            end_if_device_lost(error)
            log.exception("activations could not be published")


def _advance(sequence: HeldSequence, start: int, count: int, paused: bool = False) -> Advance:
    tokens = sequence.tokens[start : start + count]
    return Advance(sequence.id, sequence.draft_id, sequence.slot, start, tokens, paused)


def _add_work(sequence: HeldSequence, began: float, outcome: Outcome) -> None:
    """Add the time of a prompt chunk to its sequence's timings; time outside the chunks counts as queueing."""
    timings = sequence.timings
    timings.forward_seconds += outcome.forward_seconds
    timings.sample_seconds += outcome.sample_seconds
    timings.total_seconds += time.perf_counter() - began
    timings.queue_seconds = time.perf_counter() - sequence.received - timings.total_seconds
