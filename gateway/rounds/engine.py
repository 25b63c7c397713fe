"""The engine: runs the rounds, from choosing sequences and k to committing the verifier's tokens and calling listeners.

`_round` runs a round in a few lines; most other code handles failures. A lost, slow or lagging draft costs speed but
fails no request. A sequence that the verifier loses, alone or with all others, starts again from its tokens.
Does not know: text. Listeners read `sequence.output` while the next round is under way.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from itertools import count
from math import ceil

import grpc
import structlog

from gateway.config import GatewayConfig
from gateway.draft import OFF, ChosenDraft
from gateway.errors import NoVerifier, PeerLost, QueueFull, ShuttingDown
from gateway.metrics import Metrics, parts_of_round
from gateway.rounds.admission import DrainRate
from gateway.rounds.clock import RoundClock
from gateway.rounds.drafting import Drafting
from gateway.rounds.messages import wire_start
from gateway.rounds.outcomes import Outcomes
from gateway.rounds.planner import Round, Rounds
from gateway.rounds.releases import Releases
from gateway.rounds.scheduler import Scheduler
from gateway.sequence import Sequence, Stage
from gateway.verifier_client import ServedModel, VerifierClient
from spire.errors import MismatchError, OutOfCapacity
from spire.rpc.trust import ANYBODY, Trust
from spire.v1 import verifier_pb2

# Seconds that first sequences of a new verifier wait for the draft: a sequence started without one is never drafted.
_DRAFT_PATIENCE = 2.0
_PATROL = 0.25
_STAGES = {
    verifier_pb2.STAGE_WAITING: Stage.STALLED,
    verifier_pb2.STAGE_ADMITTED: Stage.ADMITTED,
    verifier_pb2.STAGE_COMPUTED: Stage.COMPUTED,
}

log = structlog.get_logger("gateway")


class Engine:
    def __init__(self, config: GatewayConfig, metrics: Metrics, trust: Trust = ANYBODY):
        self.config, self.metrics = config, metrics
        self.scheduler = Scheduler(config.max_batch, config.max_waiting)
        gateway_id = uuid.uuid4().hex[:12]
        self.verifier = VerifierClient(
            config.verifier,
            gateway_id,
            self._on_started,
            self._on_standing,
            self._on_verifier_lost,
            self._on_verifier,
            self._on_prefilled,
            self._on_drafts,
            trust,
        )
        self.draft = None if config.draft == OFF else ChosenDraft(config.draft)
        self.drafting = Drafting(self.draft, self.verifier, config, metrics)
        self._rounds = Rounds(self.scheduler, self.drafting, self.verifier, config)
        self._draining = False
        self._id_prefix, self._ids = gateway_id, count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._wakeup = asyncio.Event()
        # Whether anything happened since sequences were last admitted.
        self._stirred = False
        self._releases = Releases(self.verifier, self.scheduler, config.verify_deadline, self._stir)
        self._drain = DrainRate()
        self._outcomes = Outcomes(self.scheduler, metrics, self._releases, self._drain, self._stir)
        self.finish = self._outcomes.finish
        self._clock = RoundClock()
        self._met_verifier_at = 0.0
        # When a prefill last made progress.
        self._progress_at = time.monotonic()

    @property
    def model(self) -> ServedModel:
        """The served model. Raises NoVerifier if no verifier is usable, ShuttingDown if the gateway is draining."""
        if self._draining:
            raise ShuttingDown("this gateway is shutting down: ask another one, or try again later")
        if self.verifier.model is None or not self.verifier.usable:
            raise NoVerifier("no verifier is connected: try again later", ceil(self.verifier.seconds_until_back))
        return self.verifier.model

    @property
    def _epoch(self) -> str:
        """The name of the verifier's process; empty before the first handshake."""
        return self.verifier.model.info.epoch if self.verifier.model else ""

    @property
    def draft_info(self) -> verifier_pb2.DraftInfo | None:
        """The verifier's last description of the chosen draft, even if disconnected; None before the first draft."""
        return self.draft.info if self.draft else None

    @property
    def deepest(self) -> int:
        """The most draft tokens of a block that both verifier and draft support; 0 until both are known."""
        draft, model = self.draft_info, self.verifier.model
        return min(draft.max_speculation_depth, model.info.max_speculation_depth) if draft and model else 0

    def new_id(self, request_id: str) -> str:
        """Return a sequence id, unique across gateways. It contains the request id for the model services' logs."""
        return f"{self._id_prefix}-{next(self._ids)}-{request_id}"

    def submit(self, sequences: list[Sequence], key: str = "") -> None:
        """Queue all sequences of a request, or none. `key`: the name of the client's API key.

        Raises NoVerifier, ShuttingDown, QueueFull or InvalidRequest.
        """
        _ = self.model
        now, waiting = time.monotonic(), self.scheduler.unstarted
        most, expected = self.config.max_queue_seconds, self._drain.seconds_for(waiting, now)
        if most is not None and expected is not None and expected > most:
            raise QueueFull(
                f"{waiting} sequences wait for their first token, which takes about {expected:.0f} s: try again later",
                self._retry_after(1, now),
            )
        try:
            self.scheduler.add(sequences, key)
        except OutOfCapacity as error:
            raise QueueFull(str(error), self._retry_after(len(sequences), now)) from error
        for sequence in sequences:
            sequence.arrived_at = now
        self._stir()

    def _retry_after(self, waiting: int, now: float) -> int:
        """Return the whole seconds until `waiting` sequences should have a first token, at least a verifier step."""
        return self._drain.retry_after(waiting, now, at_least=self.verifier.pace.step_seconds)

    async def handshake(self) -> None:
        """Do the handshake with the verifier, or return without it after `startup_patience` s. Raises MismatchError."""
        deadline = time.monotonic() + self.config.startup_patience
        while True:
            try:
                await self.verifier.handshake()
                return
            except grpc.aio.AioRpcError:
                if time.monotonic() >= deadline:
                    log.warning("starting without", peer="verifier", address=self.verifier.address)
                    return
                await asyncio.sleep(0.1)

    def open(self) -> None:
        """Start the engine's background tasks."""
        loops = [self._run(), self._releases.run(), self.verifier.maintain()]
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def drain(self, hurry: asyncio.Task[None]) -> None:
        """Refuse new requests and let current ones end; fail the rest after drain_seconds or once `hurry` is done."""
        self._draining = True
        deadline = time.monotonic() + self.config.drain_seconds
        while not self.scheduler.idle and not hurry.done() and time.monotonic() < deadline:  # noqa: ASYNC110 - plain data
            await asyncio.sleep(0.02)
        self._give_up()

    def _give_up(self) -> None:
        everyone = [*self.scheduler.running.values(), *self.scheduler.starting.values(), *self.scheduler.waiting]
        self.finish(everyone, "error", ShuttingDown("the gateway was shut down before this request ended"))

    async def close(self) -> None:
        self._give_up()
        await self._releases.send()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.verifier.close()

    async def _run(self) -> None:
        while True:
            await self._until_work()
            try:
                await self.step()
            except PeerLost as error:
                log.warning("round lost", reason=str(error))
            except Exception:  # a bug must not end the loop: running sequences fail, later ones may not
                log.exception("round failed")
                self.finish(list(self.scheduler.running.values()), "error", RuntimeError("the round failed"))
                self.verifier.reset()

    async def _until_work(self) -> None:
        while not self._has_work():
            self._clock.forget()
            self._wakeup.clear()
            try:
                async with asyncio.timeout(None if self.scheduler.idle else self._pause()):
                    await self._wakeup.wait()
            except TimeoutError:
                self._patrol()

    def _has_work(self) -> bool:
        startable = self.scheduler.waiting and self._stirred and self._may_admit()
        return self.verifier.up and bool(self._rounds.next or self.scheduler.has_free or startable)

    def _stir(self) -> None:
        """Wake the loop of rounds, because an event may allow the admission of sequences or a round."""
        self._stirred = True
        self._wakeup.set()

    def _may_admit(self) -> bool:
        now = time.monotonic()
        draft_may_come = self.draft is not None and not self.draft.up and now < self._met_verifier_at + _DRAFT_PATIENCE
        return self.verifier.usable and now >= self._outcomes.admit_from and not draft_may_come

    def _pause(self) -> float:
        if self._may_admit() or not self.verifier.usable:
            return _PATROL
        return min(_PATROL, max(0.01, self._outcomes.admit_from - time.monotonic()))

    def _patrol(self) -> None:
        """Fail waiting sequences if the verifier was unusable for too long; reset the stream if prefill is stuck."""
        now = time.monotonic()
        if not self.verifier.usable:
            patience = self.config.verifier_patience + 2 * self.verifier.load_seconds
            if now - self.verifier.unusable_since > patience:
                lost = NoVerifier(f"the verifier did not come back within {patience:g} s")
                self.finish(list(self.scheduler.waiting), "error", lost)
        overdue = now - self._progress_at > self.verifier.limit(self.config.start_deadline)
        if self.verifier.up and self.scheduler.reading and overdue:
            log.warning("no prompt is read", seconds=self.verifier.limit(self.config.start_deadline))
            self.verifier.reset()

    async def step(self) -> None:
        """Start waiting sequences if places are free, and run one round. Raises PeerLost if the verifier is lost."""
        began = self._clock.begin(time.monotonic())
        if not self.scheduler.reading:
            self._progress_at = began
        await self._start()
        if (current := self._rounds.take()) is None:
            return
        try:
            await self._round(current, began)
        except BaseException as error:
            self._clock.forget()
            self._rounds.forget_next()
            # On PeerLost the round stays under way, so that `lose_all` knows which sequences were being computed.
            if not isinstance(error, PeerLost):
                self.scheduler.end_round(current.batch)
            raise
        else:
            self.scheduler.end_round(current.batch)
        finally:
            self._wakeup.set()

    async def _round(self, current: Round, began: float) -> None:
        """Send a round, await its answer, commit its tokens and learn from it. The round's time counts from `began`."""
        await self._rounds.send(current)
        if current.asked is None:
            return
        answer, asked_seconds = await self.verifier.answer(current.asked)
        await self._rounds.follow()
        batch, plan = current.sent, current.plan
        self.drafting.settle(plan, answer)
        shown = self.drafting.shown_by(batch, plan, answer)
        kept = self._outcomes.commit(self.scheduler.still(current.batch), answer, plan)
        timings, now = answer.timings, time.monotonic()
        took = self._clock.end(now, began, current.sent_at, asked_seconds, timings.queue_seconds, answer.over_at)
        models = (plan.model_seconds, timings.forward_seconds, timings.sample_seconds)
        parts = parts_of_round(took.seconds, models, plan.waited_seconds, took.queued, took.asked)
        self.metrics.round(parts, len(batch), max(map(plan.drafted, batch)))
        if plan.decoding:
            self.metrics.compared(plan.decoding, kept, took.seconds)
        self.drafting.learn(current.load, shown, plan, timings, took)

    async def _start(self) -> None:
        """Send a Start message for each waiting sequence that gets a place now."""
        if not self._may_admit():
            return
        self._stirred = False
        self._outcomes.settle(self._epoch)
        starts = self.scheduler.admit()
        if self.scheduler.has_ended:
            self._releases.wake()
        for sequence in starts:
            if self.scheduler.starting.get(sequence.wire_id) is not sequence:  # it ended while others were sent
                continue
            if not sequence.admitted_at:
                sequence.admitted_at = time.monotonic()
                self.metrics.queue_time.observe(sequence.admitted_at - sequence.arrived_at)
            sequence.draft_id = self.drafting.draft_for(sequence)
            self.drafting.pause(sequence)
            await self.verifier.start(wire_start(sequence), self.config.verify_deadline)

    def _on_started(self, message: verifier_pb2.Started) -> None:
        now = self._progress_at = time.monotonic()
        self._stir()
        self._outcomes.started(message, now)

    def _on_standing(self, message: verifier_pb2.Standing) -> None:
        if (stage := _STAGES.get(message.stage)) is None:
            return
        if stage is not Stage.STALLED:
            self._progress_at = time.monotonic()
        for sequence_id in message.sequence_ids:
            self.scheduler.stands(sequence_id, stage)
        self._stir()

    def _on_verifier(self, before: ServedModel | None, model: ServedModel) -> None:
        self.scheduler.capacity = min(self.config.max_batch, model.info.max_sequences or self.config.max_batch)
        if before is None or before.info.epoch != model.info.epoch:
            self._releases.forget()
            self._met_verifier_at = time.monotonic()
        if before is not None and before.info.target_fingerprint != model.info.target_fingerprint:
            old, new = before.info.target_fingerprint, model.info.target_fingerprint
            changed = MismatchError(f"the verifier now serves another target: {new!r} instead of {old!r}")
            log.error("target changed", reason=str(changed))
            self.finish(list(self.scheduler.waiting), "error", changed)
        self._stir()

    def _on_drafts(self, drafts: Iterable[verifier_pb2.DraftInfo]) -> None:
        if self.draft:
            self.draft.told(drafts)
        self._stir()

    def _on_prefilled(self) -> None:
        self._progress_at = time.monotonic()

    def _on_verifier_lost(self) -> None:
        if self.draft:
            self.draft.told([])
        self._outcomes.lose_all(self._epoch)
        self._stir()
