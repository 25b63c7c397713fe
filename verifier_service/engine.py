"""The engine: one thread that owns the target, its cache and every sequence. Others hand it work and get answers.

A turn is: take what has arrived, draft what waits for the target's own guesses, and one step: a single forward over all
blocks that wait (all streams merged) and as much prompt as the token budget has room for. Decoding therefore never
waits for more than one chunk of prompt. With nothing to do the thread sleeps in its inbox.

When memory runs out, what is parked for later prompts goes first, then the youngest sequence is preempted: its gateway
starts it again from its tokens, as after any loss.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import torch

from spire.drafting import Drafted, Guess, ProposeTask, answer
from spire.errors import InvalidRequest, NotFinite, OutOfCapacity, RequestError, SpireError, UnknownSequence
from spire.rpc.errors import OK, code_name, item_status
from spire.sampling import SamplingRows
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.activations import Advance, Deliver, Publisher, Taps
from verifier_service.batch import Block, Limits, RaggedBatch, pad, q_problems, read_block
from verifier_service.logprobs import Scores
from verifier_service.metrics import VerifierMetrics
from verifier_service.prefixes import Prefixes
from verifier_service.prompts import Prompts
from verifier_service.sequence import Sequence
from verifier_service.slots import Slots
from verifier_service.step import ModelSteps, Outcome, PromptChunk
from verifier_service.tasks import CallTask, StartTask, VerifyTask

log = structlog.get_logger("verifier_service")
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Entry:
    """A block and where its result belongs."""

    block: Block
    task: VerifyTask
    index: int


class Engine:
    def __init__(
        self,
        steps: ModelSteps,
        publisher: Publisher,
        prefixes: Prefixes,
        limits: Limits,
        metrics: VerifierMetrics,
        token_budget: int,
    ):
        self.steps, self.publisher, self.prefixes = steps, publisher, prefixes
        self.limits, self.metrics = limits, metrics
        self._prompts = Prompts(steps.cache, token_budget)
        self.slots = Slots(steps, publisher, prefixes, self._prompts, limits, metrics)
        self.sequences = self.slots.sequences
        self._drafting: deque[ProposeTask] = deque()
        self._verifying: deque[VerifyTask] = deque()
        self._inbox: queue.SimpleQueue[StartTask | ProposeTask | VerifyTask | CallTask | None] = queue.SimpleQueue()
        self._stopping = False
        # Done when the thread has ended; carries the error if it died.
        self.ended: Future[None] = Future()
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="target-model", daemon=True)

    # --- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=10)

    def submit(self, task: StartTask | ProposeTask | VerifyTask) -> None:
        self._inbox.put(task)

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run `function` on the engine's thread between two steps."""
        done: Future[Result] = Future()
        self._inbox.put(CallTask(lambda: function(*args), done))
        return done

    def seconds_in_turn(self) -> float:
        """How long the current turn has taken, 0 when idle: what a watchdog looks at."""
        began = self._turn_began
        return 0.0 if began is None else time.perf_counter() - began

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
            self.ended.set_result(None)
        except BaseException as error:
            log.exception("the engine has died")
            self.ended.set_exception(error)

    def _turn(self) -> None:
        self._receive()
        self._turn_began = time.perf_counter()
        self._draft_waiting()
        self._step()
        self._turn_began = None

    def _receive(self) -> None:
        """Take everything that has arrived; sleep only when there is nothing else to do."""
        idle = not self._drafting and not self._verifying and not self._prompts
        try:
            while not self._stopping:
                self._accept(self._inbox.get(block=idle))
                idle = False
        except queue.Empty:
            return

    def _accept(self, task: StartTask | ProposeTask | VerifyTask | CallTask | None) -> None:
        match task:
            case None:
                self._stopping = True
            case StartTask():
                self._accept_start(task)
            case ProposeTask():
                self._drafting.append(task)
            case VerifyTask():
                self._verifying.append(task)
            case CallTask():
                self._accept_call(task)

    def _accept_call(self, task: CallTask) -> None:
        if not task.done.set_running_or_notify_cancel():
            return  # whoever called has gone, and answering a cancelled future is an error
        try:
            task.done.set_result(task.function())
        except Exception as error:
            task.done.set_exception(error)

    # --- sequences ----------------------------------------------------------------------------------------------

    def _accept_start(self, task: StartTask) -> None:
        try:
            known = self.sequences.get(task.start.sequence_id)
            if known is None:
                self.slots.admit(task)
            elif known.start != task.start:
                raise InvalidRequest(f"sequence {known.id} is live with another Start")
            else:
                known.gateway, known.reply = task.gateway, task.reply
                if known.started:
                    task.reply(pb.RoundsResponse(started=known.started))
        except RequestError as error:
            task.reply(pb.RoundsResponse(started=self._refused_start(task.start.sequence_id, error)))

    def _refused_start(self, sequence_id: str, error: SpireError) -> pb.Started:
        status = item_status(error)
        self._count_refusal(sequence_id, status)
        return pb.Started(sequence_id=sequence_id, status=status)

    def _count_refusal(self, sequence_id: str, status: tensor_pb2.ItemStatus) -> None:
        code = code_name(status.code)
        self.metrics.refused.labels(code).inc()
        log.debug("refused", sequence=sequence_id, code=code)

    # --- drafting (MagicDec) ------------------------------------------------------------------------------------

    def _draft_waiting(self) -> None:
        """Let the target guess for each batch that waits."""
        while self._drafting:
            seconds = answer(self._drafting.popleft(), self._check_guess, self._propose)
            self.metrics.busy_seconds.labels("draft").inc(seconds)

    def _check_guess(self, guess: Guess) -> None:
        sequence = self.slots.held(guess.sequence_id)
        sequence.check_guess(guess, self.steps.cache.lengths[sequence.slot])

    def _propose(self, guesses: list[Guess], k: int, rows: SamplingRows) -> Drafted:
        slots = [self.sequences[guess.sequence_id].slot for guess in guesses]
        self.metrics.steps.labels("draft").inc(k)
        self.metrics.positions.labels("draft").inc(k * len(slots))
        return self.steps.draft(slots, [guess.newest_token for guess in guesses], k, rows)

    # --- a step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One ragged forward for all batches that wait and a chunk of prompt; answer, publish."""
        began = time.perf_counter()
        tasks = self._take_batches()
        entries, batch = self._with_sound_q(self._with_room(self._admissible(tasks)))
        taken = batch.tokens_BT.numel() if batch else 0
        for sequence in self._prompts.unseen(taken):
            self._reuse_prefix(sequence)
        chosen, chunk = self._prompts.next_chunk(taken)
        verified, prefilled = self._forward(entries, batch, chosen, chunk)
        for task in tasks:
            forward, sample = (verified.forward_seconds, verified.sample_seconds) if verified else (0.0, 0.0)
            timings = _timings(began - task.received, forward, sample, time.perf_counter() - began)
            result = pb.VerifyBatchResult(batch_id=task.batch.batch_id, results=task.results, timings=timings)
            task.reply(pb.RoundsResponse(verified=result))
        if verified:
            self._publish_verified(entries, verified)
        if chunk and prefilled:
            self._advance_prompts(chosen, chunk, prefilled, began)

    def _forward(
        self, entries: Rows[_Entry], batch: RaggedBatch | None, chosen: Rows[Sequence], chunk: PromptChunk | None
    ) -> tuple[Outcome | None, Outcome | None]:
        """Run the forward and write each entry's result. A step that fails is answered and changes nothing."""
        if not batch and not chunk:
            return None, None
        try:
            verified, prefilled = self.steps.run(batch, chunk)
        except Exception as error:
            log.exception("a step failed", blocks=len(entries), prompts=len(chosen))
            for entry in entries:
                self._refuse(entry.task, entry.index, NotFinite(f"the verifier could not run this step: {error}"))
            for sequence in chosen:
                self._fail_start(sequence, NotFinite(f"the verifier could not prefill this sequence: {error}"))
            return None, None
        if batch and verified:
            self._count_verified(entries, batch, verified)
        if chunk and prefilled:
            self._count_step("prefill", prefilled, sum(chunk.counts))
        return verified, prefilled

    def _count_verified(self, entries: Rows[_Entry], batch: RaggedBatch, outcome: Outcome) -> None:
        for row, entry in enumerate(entries):
            self._conclude(entry, outcome, row)
        self._count_step("verify", outcome, sum(batch.counts) + len(batch.counts))
        self.metrics.tokens.inc(sum(len(tokens) for tokens in outcome.tokens))
        self.metrics.draft_tokens.inc(sum(batch.counts))
        self.metrics.accepted_tokens.inc(sum(outcome.accepted))

    def _publish_verified(self, entries: Rows[_Entry], outcome: Outcome) -> None:
        advances = [
            _advance(entry.block.sequence, entry.block.base, accepted + 1 if sound and not refusal else 0)
            for entry, accepted, sound, refusal in zip(
                entries, outcome.accepted, outcome.finite, outcome.refused, strict=True
            )
        ]
        self._publish(lambda: self.publisher.publish(advances, outcome.taps_BTND))

    # --- verification -------------------------------------------------------------------------------------------

    def _take_batches(self) -> list[VerifyTask]:
        """All that wait, up to the first that names a sequence again: that one needs this step's outcome."""
        tasks: list[VerifyTask] = []
        seen: set[str] = set()
        while self._verifying:
            ids = {item.sequence_id for item in self._verifying[0].batch.items}
            if ids & seen:
                break
            seen |= ids
            tasks.append(self._verifying.popleft())
        return tasks

    def _admissible(self, tasks: Rows[VerifyTask]) -> list[_Entry]:
        """The blocks to verify, by slot. Repeats get their stored answer, wrong items their error."""
        entries: list[_Entry] = []
        seen: set[str] = set()
        for task in tasks:
            task.results = [pb.VerifyResult() for _ in task.batch.items]
            for index, item in enumerate(task.batch.items):
                try:
                    if item.sequence_id in seen:
                        raise InvalidRequest(f"sequence {item.sequence_id} is in this batch twice")
                    seen.add(item.sequence_id)
                    block = self._read(item)
                    if isinstance(block, Block):
                        entries.append(_Entry(block, task, index))
                    else:
                        task.results[index] = block
                except RequestError as error:
                    self._refuse(task, index, error)
        return sorted(entries, key=lambda entry: entry.block.sequence.slot)

    def _read(self, item: pb.VerifyItem) -> Block | pb.VerifyResult:
        sequence = self.slots.held(item.sequence_id)
        base = self.steps.cache.lengths[sequence.slot]
        return sequence.stored_answer(item, base) or read_block(item, sequence, base, self.limits)

    def _with_sound_q(self, entries: list[_Entry]) -> tuple[list[_Entry], RaggedBatch | None]:
        """The entries whose q can be used, and their batch; none when there are none."""
        if not entries:
            return [], None
        batch = pad([entry.block for entry in entries], self.steps.device)
        problems = q_problems(batch, self.limits.vocab_size)
        if not any(problems):
            return entries, batch
        for entry, problem in zip(entries, problems, strict=True):
            if problem:
                self._refuse(entry.task, entry.index, InvalidRequest(problem))
        sound = [entry for entry, problem in zip(entries, problems, strict=True) if not problem]
        return sound, pad([entry.block for entry in sound], self.steps.device) if sound else None

    def _refuse(self, task: VerifyTask, index: int, error: SpireError) -> None:
        item, status = task.batch.items[index], item_status(error)
        self._count_refusal(item.sequence_id, status)
        task.results[index] = pb.VerifyResult(sequence_id=item.sequence_id, round=item.round, status=status)

    def _with_room(self, entries: list[_Entry]) -> list[_Entry]:
        """The entries for whose new positions there is memory, after whatever had to give way."""
        while entries:
            slots = [entry.block.sequence.slot for entry in entries]
            new_tokens = 1 + max(entry.block.k for entry in entries)
            if self.steps.cache.reserve(slots, new_tokens):
                break
            if self.prefixes.shed():
                continue
            victim = self._preempt_youngest()
            for entry in entries:
                if entry.block.sequence is victim:
                    self._refuse(entry.task, entry.index, UnknownSequence(f"sequence {victim.id} was preempted"))
            entries = [entry for entry in entries if entry.block.sequence is not victim]
        return entries

    def _preempt_youngest(self) -> Sequence:
        """Let the sequence that was admitted last start again when there is memory."""
        youngest = self.slots.youngest
        self.metrics.preempted.inc()
        if youngest.started is None:
            self._fail_start(youngest, OutOfCapacity("no memory is left for its cache"))
        else:
            self.slots.release([youngest.id])
        return youngest

    def _conclude(self, entry: _Entry, outcome: Outcome, row: int) -> None:
        sequence, block = entry.block.sequence, entry.block
        if not outcome.finite[row]:
            sequence.poisoned = True
            self._refuse(entry.task, entry.index, _not_finite(sequence))
            return
        if refusal := outcome.refused[row]:
            self._refuse(entry.task, entry.index, refusal)
            return
        answer = pb.VerifyResult(
            sequence_id=sequence.id,
            round=block.round,
            status=OK,
            accepted=outcome.accepted[row],
            tokens=outcome.tokens[row],
            logprobs=outcome.logprobs[row],
        )
        sequence.advance(block.base, answer)
        entry.task.results[entry.index] = answer

    def _count_step(self, kind: str, outcome: Outcome, positions: int) -> None:
        self.metrics.steps.labels(kind).inc()
        self.metrics.positions.labels(kind).inc(positions)
        self.metrics.busy_seconds.labels(kind).inc(outcome.forward_seconds + outcome.sample_seconds)

    # --- prefill ------------------------------------------------------------------------------------------------

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Before its first chunk: copy what another sequence holds of its prompt.

        What a draft will be replayed, the activations of the sink and the window, is computed all the same.
        """
        sequence.compared = True
        if sequence.start.prompt_logprobs:
            return  # every position is needed
        sink, window = self.publisher.replayed(sequence.draft_id)
        prompt = sequence.start.tokens
        donor, length = self.prefixes.longest(prompt[: len(prompt) - 1 - window])
        if length <= sink:
            return
        if sink:
            began, first = time.perf_counter(), PromptChunk([sequence.slot], [sequence.prompt_L[:sink]], [False], [[]])
            _, prefilled = self._forward([], None, [sequence], first)
            if prefilled:
                self._advance_prompts([sequence], first, prefilled, began)
            if sequence.id not in self.sequences:
                return  # it could not be computed, and has been refused
        self.steps.cache.copy(donor, sequence.slot, length)
        self.publisher.skip(sequence.id, sequence.draft_id, list(prompt[sink:length]))
        sequence.cached_tokens = length
        self.metrics.cached_tokens.inc(length)

    def _advance_prompts(self, chosen: Rows[Sequence], chunk: PromptChunk, outcome: Outcome, began: float) -> None:
        """Publish what was prefilled; answer the prompts that are whole."""
        ends = [self.steps.cache.lengths[sequence.slot] for sequence in chosen]
        advances = [
            _advance(sequence, end - count, count) if sound else _advance(sequence, end, 0)
            for sequence, end, count, sound in zip(chosen, ends, chunk.counts, outcome.finite, strict=True)
        ]
        self._publish(lambda: self.publisher.publish(advances, outcome.taps_BTND, announce=False))
        for row, sequence in enumerate(chosen):
            _add_work(sequence, began, outcome)
            if not outcome.finite[row]:
                sequence.poisoned = True
                self._fail_start(sequence, _not_finite(sequence))
                continue
            if scores := outcome.scores[row]:
                sequence.scores.append(scores)
            if refusal := outcome.refused[row]:
                self._fail_start(sequence, refusal)
            elif chunk.last[row]:
                self._finish_start(sequence, outcome.tokens[row][0], outcome.logprobs[row])

    def _finish_start(self, sequence: Sequence, token: int, logprobs: pb.Logprobs | None) -> None:
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
            self._publish(lambda: self.publisher.replay(sequence.draft_id, [sequence.id]))

    def _fail_start(self, sequence: Sequence, error: SpireError) -> None:
        self.slots.release([sequence.id])
        sequence.reply(pb.RoundsResponse(started=self._refused_start(sequence.id, error)))

    # --- activations --------------------------------------------------------------------------------------------

    def subscribe(self, draft_id: str, taps: Taps, deliver: Deliver) -> None:
        self._publish(lambda: self.publisher.subscribe(draft_id, taps, deliver))
        self.steps.tapped_layers = self.publisher.layers

    def replay(self, draft_id: str, sequence_ids: Rows[str]) -> list[str]:
        """Send sinks and windows to the draft again. Returns the ids of which nothing is held."""
        self._publish(lambda: self.publisher.replay(draft_id, sequence_ids))
        return self.publisher.unknown(draft_id, sequence_ids)

    def replay_all(self, draft_id: str, deliver: Deliver) -> None:
        self._publish(lambda: self.publisher.replay_all(draft_id, deliver))

    def _publish(self, publish: Callable[[], object]) -> None:
        """A draft only guesses: what goes wrong on the way to it costs speed, never a sequence."""
        replays, published = self.publisher.replays, self.publisher.bytes_published
        try:
            publish()
        except Exception:
            log.exception("activations could not be published")
        self.metrics.replays.inc(self.publisher.replays - replays)
        self.metrics.activation_bytes.inc(self.publisher.bytes_published - published)


def _advance(sequence: Sequence, start: int, count: int) -> Advance:
    tokens = sequence.tokens[start : start + count]
    return Advance(sequence.id, sequence.draft_id, sequence.slot, start, tokens)


def _not_finite(sequence: Sequence) -> NotFinite:
    return NotFinite(f"the target's numbers for sequence {sequence.id} are not finite")


def _timings(queued: float, forward: float, sample: float, total: float) -> pb.Timings:
    return pb.Timings(queue_seconds=queued, forward_seconds=forward, sample_seconds=sample, total_seconds=total)


def _add_work(sequence: Sequence, began: float, outcome: Outcome) -> None:
    """A prompt is prefilled in several chunks: what is not one of them was waiting."""
    timings = sequence.timings
    timings.forward_seconds += outcome.forward_seconds
    timings.sample_seconds += outcome.sample_seconds
    timings.total_seconds += time.perf_counter() - began
    timings.queue_seconds = time.perf_counter() - sequence.received - timings.total_seconds
