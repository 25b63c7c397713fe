"""The engine: one thread that owns the target, its cache and every sequence. Others hand it work and get answers.

A turn is: take what has arrived, draft what waits for the target's own guesses, and one step: a single forward over all
blocks that wait (all streams merged) and as much prompt as the token budget has room for. Decoding therefore never
waits for more than one chunk of prompt. With nothing to do the thread sleeps in its inbox.

When memory runs out, what is parked for later prompts goes first, then the youngest sequence is preempted: its gateway
starts it again from its tokens, as after any loss. What starts then waits here for room, in order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import structlog
import torch
from google.protobuf.message import DecodeError

from spire.drafting import Drafted, Guess, ProposeTask, answer
from spire.errors import InvalidRequest, RequestError, StaleBlock
from spire.model.lost_device import end_if_device_lost
from spire.pace import Pace
from spire.rpc.carrier import OverwritingRingReader
from spire.rpc.errors import OK
from spire.rpc.inbox import Inbox
from spire.rpc.line import Line
from spire.sampling import SamplingRows
from spire.turns import take_short_turns
from spire.v1 import verifier_pb2 as pb
from verifier_service.activations import Advance, Publisher, Share, Taps
from verifier_service.batch import Limits
from verifier_service.blocks import Blocks, Entry, Taken
from verifier_service.delivery import Deliver
from verifier_service.logprobs import Scores
from verifier_service.metrics import VerifierMetrics
from verifier_service.orders import Orders
from verifier_service.prefixes import Prefixes
from verifier_service.prompts import Prompts
from verifier_service.sequence import Sequence, not_finite, standing, step_failed
from verifier_service.slots import Slots
from verifier_service.step import FIRST_POSITIONS, ModelSteps, Outcome, PromptChunk
from verifier_service.tasks import CallTask, GuessTask, StartTask, VerifyTask
from verifier_service.token_budget import TokenBudget

log = structlog.get_logger("verifier_service")
Result = TypeVar("Result")
Task = StartTask | ProposeTask | VerifyTask | GuessTask | CallTask

# What one turn takes at most: however much arrives, steps go on.
MOST_TAKEN = 256


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
        self.pace, self._budget = Pace(), TokenBudget(token_budget)
        self._prompts = Prompts(steps.cache, self._budget)
        # Positions of prompts that have been computed.
        self.prefilled = 0
        self.slots = Slots(steps, publisher, prefixes, self._prompts, limits, metrics)
        self.sequences = self.slots.sequences
        # By draft id. Whoever meets a draft sets them, from another thread.
        self.q_rings: dict[str, OverwritingRingReader] = {}
        self.lines: dict[str, Line] = {}
        self.orders = Orders(self.sequences, limits, self.pace)
        self._blocks = Blocks(steps, self.slots, prefixes, limits, metrics, self.q_rings, self.orders)
        self._drafting: deque[ProposeTask] = deque()
        self._inbox: Inbox[Task | None] = Inbox()
        # What arrived while a step was under way, and was looked through for orders.
        self._put_off: list[Task | None] = []
        self._stopping = False
        # Done when the thread has ended; carries the error if it died.
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="target-model", daemon=True)

    # --- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end after its turn; `ended` says when it has."""
        self._inbox.put(None)

    def submit(self, task: StartTask | ProposeTask | VerifyTask | GuessTask) -> None:
        self._inbox.put(task)

    def read(self, line: Line, brought: Callable[[bytes], Task], ended: Callable[[], object]) -> None:
        """Take what a draft or a gateway sends by a line, until it ends."""
        self._inbox.read(line, brought, ended)

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run `function` on the engine's thread between two steps."""
        done: Future[Result] = Future()
        self._inbox.put(CallTask(lambda: function(*args), done))
        return done

    def measure(self) -> None:
        """Take a step that is nobody's, so that even the first one has a limit. Call it before `start`."""
        with self.pace.step("prompt", FIRST_POSITIONS):
            self.steps.take_first()

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        take_short_turns()
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
        self.orders.give_up_late()
        self._blocks.ask()
        self._draft_waiting()
        self._step()
        self.pace.rest()

    def _arrived(self) -> list[Task | None]:
        """What has arrived, the first of it; sleeps only when there is nothing else to do."""
        tasks, self._put_off = self._put_off, []
        work = tasks or self._drafting or self._blocks.ready or self._prompts or self.slots.may_admit
        return tasks + self._inbox.take(MOST_TAKEN - len(tasks), 0 if work else self.orders.patience)

    def _accept(self, task: Task | None) -> None:
        match task:
            case None:
                self._stopping = True
            case StartTask():
                self._accept_start(task)
            case ProposeTask():
                self._drafting.append(task)
            case VerifyTask():
                self._blocks.add(task)
            case GuessTask():
                self._accept_guess(task)
            case CallTask():
                self._accept_call(task)

    def _accept_guess(self, task: GuessTask) -> None:
        try:
            self.orders.take(task.draft_id, task.read(), task.received)
        except DecodeError as error:
            log.warning("a guess cannot be read", draft_id=task.draft_id, error=str(error))

    def _accept_call(self, task: CallTask) -> None:
        if not task.done.set_running_or_notify_cancel():
            return  # whoever called has gone, and answering a cancelled future is an error
        try:
            task.done.set_result(task.function())
        except Exception as error:
            end_if_device_lost(error)
            task.done.set_exception(error)

    # --- sequences ----------------------------------------------------------------------------------------------

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
                self.slots.waiting.replace(task)
        except RequestError as error:
            self.slots.refuse(task.start.sequence_id, task.reply, error)

    # --- drafting (MagicDec) ------------------------------------------------------------------------------------

    def _draft_waiting(self) -> None:
        """Let the target guess for each batch that waits."""
        while self._drafting:
            task = self._drafting.popleft()
            with self.pace.step(f"draft {task.k}", task.k * len(task.guesses)):
                seconds = answer(task, partial(self._check_guess, task.asker), self._propose)
            self.metrics.busy_seconds.labels("draft").inc(seconds)

    def _check_guess(self, gateway: str, guess: Guess) -> None:
        sequence = self.slots.held(guess.sequence_id, gateway)
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
        taken = self._blocks.take()
        for sequence in self._prompts.unseen(taken.positions):
            sequence.tell(standing(sequence.id, pb.STAGE_COMPUTED))
            self._reuse_prefix(sequence)
        chosen, chunk = self._prompts.next_chunk(taken.positions)
        verified, prefilled = self._forward(taken, chosen, chunk)
        over = time.perf_counter()
        if taken.drafted:
            # Drafts take up what they are asked while this thread gathers what they need for it.
            self._ask_ahead()
        else:
            self._answer(taken, verified, began, over)
        shares = self._shares(taken.entries, verified)
        self._publish(lambda: self.publisher.announce(shares))
        self._publish(lambda: self.publisher.store(shares))
        if taken.drafted:
            # Last: where all processors are busy the gateway goes on with it instead of this thread.
            self._answer(taken, verified, began, over)
        if chunk and prefilled:
            self._advance_prompts(chosen, chunk, prefilled, began)

    def _answer(self, taken: Taken, verified: Outcome | None, began: float, over: float) -> None:
        if verified:
            self._blocks.write_answers(taken, verified)
            self._blocks.count(taken, verified)
        taken.answer(verified, began, over, self.steps.cache.usage)

    def _ask_ahead(self) -> None:
        """Ask drafts for the round that was sent ahead, before anything else is done.

        As a rule it came while they drafted for this one. If not, it may be there now. In the midst of a step no
        sequence may come or go: what else has arrived waits for the next turn.
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
        self, taken: Taken, chosen: Rows[Sequence], chunk: PromptChunk | None
    ) -> tuple[Outcome | None, Outcome | None]:
        """Run the forward and write each block's result. A step that fails is answered; its sequences are let go."""
        if not taken.batch and not chunk:
            return None, None
        try:
            verified, prefilled = self._timed(taken, chunk)
        except Exception as error:
            end_if_device_lost(error)
            log.exception("a step failed", blocks=len(taken.entries), prompts=len(chosen))
            self._blocks.fail(taken)
            for sequence in chosen:
                self.slots.fail_start(sequence, step_failed(sequence.id))
            return None, None
        if verified:
            self._blocks.conclude(taken, verified)
        if chunk and prefilled:
            self.metrics.step("prefill", sum(chunk.counts), prefilled.seconds)
            self.prefilled += sum(chunk.counts)
        return verified, prefilled

    def _timed(self, taken: Taken, chunk: PromptChunk | None) -> tuple[Outcome | None, Outcome | None]:
        positions, began = taken.positions + (sum(chunk.counts) if chunk else 0), time.perf_counter()
        with self.pace.step("prompt" if chunk else "verify", positions):
            outcomes = self.steps.run(taken.batch, chunk)
        seconds = time.perf_counter() - began
        if chunk:
            self._budget.observe(positions, seconds)
        else:
            self._budget.observe_plain(seconds)
        return outcomes

    def _shares(self, entries: Rows[Entry], outcome: Outcome | None) -> list[Share]:
        if outcome is None:
            return []
        advances = [
            _advance(block.sequence, block.base, accepted + 1 if outcome.sound(row) else 0, block.quiet)
            for row, (block, accepted) in enumerate(
                zip((entry.block for entry in entries), outcome.accepted, strict=True)
            )
        ]
        shares: list[Share] = []
        self._publish(lambda: shares.extend(self.publisher.shares(advances, outcome.taps_BTND)))
        return shares

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
        donor, length = self.prefixes.longest(prompt[: len(prompt) - 1 - window], sequence.start.cache_salt)
        if length <= sink:
            return
        if sink:
            began, first = (
                time.perf_counter(),
                PromptChunk([sequence.slot], [sequence.prompt_L[:sink]], [False], [[]], [1]),
            )
            _, prefilled = self._forward(Taken(), [sequence], first)
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
        except Exception as error:
            end_if_device_lost(error)
            log.exception("activations could not be published")
        if self.publisher.replays > replays:
            self.metrics.replays.inc(self.publisher.replays - replays)
        if self.publisher.bytes_published > published:
            self.metrics.activation_bytes.inc(self.publisher.bytes_published - published)


def _advance(sequence: Sequence, start: int, count: int, quiet: bool = False) -> Advance:
    tokens = sequence.tokens[start : start + count]
    return Advance(sequence.id, sequence.draft_id, sequence.slot, start, tokens, quiet)


def _add_work(sequence: Sequence, began: float, outcome: Outcome) -> None:
    """A prompt is prefilled in several chunks: what is not one of them was waiting."""
    timings = sequence.timings
    timings.forward_seconds += outcome.forward_seconds
    timings.sample_seconds += outcome.sample_seconds
    timings.total_seconds += time.perf_counter() - began
    timings.queue_seconds = time.perf_counter() - sequence.received - timings.total_seconds
