"""The rounds: which sequences, what the draft guesses, what the verifier accepts, who hears of it.

`_round` is the system in a few lines. Everything else is what may go wrong between them: a draft that is gone, slow or
behind costs speed and never a request; a verifier that forgets a sequence or vanishes makes it start again from its
tokens. What it does not know: text. Listeners read `sequence.output` while the next round is under way.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import abc
from collections.abc import Iterable
from math import ceil

import grpc
import structlog

from gateway.admission import DrainRate
from gateway.config import GatewayConfig
from gateway.errors import NoVerifier, PeerLost, QueueFull, ReaderTooSlow, ShuttingDown
from gateway.messages import logprobs_of, wire_start
from gateway.metrics import Gauges, Metrics, parts_of_round
from gateway.peers import DraftPeer, Model, VerifierPeer
from gateway.releases import Releases
from gateway.rounds import Round, Rounds
from gateway.scheduler import Scheduler
from gateway.sequence import Logprob, Sequence, Stage, State
from gateway.speculation import Proposals, Speculation
from spire.errors import InvalidRequest, MismatchError, NotFinite, OutOfCapacity
from spire.rpc.errors import raise_for
from spire.rpc.trust import ANYBODY, Trust
from spire.v1 import tensor_pb2, verifier_pb2

# How long to leave a verifier alone that refused a sequence, which rather waits there until there is room.
_FULL_PAUSE = 0.05
# How long a new verifier's first sequences wait for the draft to follow it: what starts before then is never drafted.
_DRAFT_PATIENCE = 2.0
_PATROL = 0.25
# What a client may leave unread of a stream beside what the kernel and the connection buffer. Its sequence ends then.
MOST_UNREAD_BYTES = 2 << 20
_STAGES = {
    verifier_pb2.STAGE_WAITING: Stage.STALLED,
    verifier_pb2.STAGE_ADMITTED: Stage.ADMITTED,
    verifier_pb2.STAGE_COMPUTED: Stage.COMPUTED,
}

log = structlog.get_logger("gateway")


class Engine:
    def __init__(self, config: GatewayConfig, metrics: Metrics, trust: Trust = ANYBODY):
        self.config = config
        self.metrics = metrics
        self.scheduler = Scheduler(config.max_batch, config.max_waiting, config.lanes)
        gateway_id = uuid.uuid4().hex[:12]
        self.verifier = VerifierPeer(
            config.verifier,
            gateway_id,
            self._on_started,
            self._on_standing,
            self._on_verifier_lost,
            self._on_verifier,
            self._on_prefilled,
            trust,
            config.shared_memory,
        )
        self.draft = DraftPeer(config.draft, self.verifier, config.propose_deadline, trust) if config.draft else None
        self.speculation = Speculation(self.draft, self.verifier, config, metrics)
        self._rounds = Rounds(self.scheduler, self.speculation, self.verifier, config)
        self._draining = False
        self._id_prefix = gateway_id
        self._ids = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._wakeup = asyncio.Event()
        # Whether anything happened since it was last seen who may start.
        self._stirred = False
        self._releases = Releases(self.verifier, self.scheduler, config.verify_deadline, self._stir)
        self._drain = DrainRate()
        self._admit_from = 0.0
        self._met_verifier_at = 0.0
        # By lane, while one round follows the other: until when the last one's time was counted, and when the verifier
        # was done with it, by its clock.
        self._counted_until: dict[int, float] = {}
        self._over_at: dict[int, float] = {}
        # When a prefill last made progress.
        self._progress_at = time.monotonic()

    # -- what the rest of the gateway asks ---------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """What is served. Raises NoVerifier when no verifier is connected, ShuttingDown when nothing more is."""
        if self._draining:
            raise ShuttingDown("this gateway is shutting down: ask another one, or try again later")
        if self.verifier.model is None or not self.verifier.usable:
            raise NoVerifier("no verifier is connected: try again later", ceil(self.verifier.seconds_until_back))
        return self.verifier.model

    def new_id(self, request_id: str) -> str:
        """A sequence id that no other gateway makes. The request's is in it: so the model services' logs tell it."""
        self._ids += 1
        return f"{self._id_prefix}-{self._ids}-{request_id}"

    def submit(self, sequences: list[Sequence], key: str = "") -> None:
        """Queue the choices of a request of this API key, all or none.

        Raises NoVerifier, ShuttingDown, QueueFull or InvalidRequest.
        """
        _ = self.model
        now = time.monotonic()
        self._refuse_long_wait(now)
        try:
            self.scheduler.add(sequences, key)
        except OutOfCapacity as error:
            raise QueueFull(str(error), self._retry_after(len(sequences), now)) from error
        for sequence in sequences:
            sequence.moments.arrived = now
        self._stir()

    def _refuse_long_wait(self, now: float) -> None:
        """Raises QueueFull when whoever comes now would wait for longer than anybody shall."""
        most, waiting = self.config.max_queue_seconds, self.scheduler.unstarted
        expected = self._drain.seconds_for(waiting, now)
        if most is not None and expected is not None and expected > most:
            raise QueueFull(
                f"{waiting} sequences wait for their first token, which takes about {expected:.0f} s: try again later",
                self._retry_after(1, now),
            )

    def _retry_after(self, waiting: int, now: float) -> int:
        """Whole seconds until so many more have their first token. At least one step is between."""
        return self._drain.retry_after(waiting, now, at_least=self.verifier.pace.step_seconds)

    def finish(self, sequences: Iterable[Sequence], reason: str, error: Exception | None = None) -> None:
        """End sequences, wherever they stand, and free what they hold."""
        for sequence in sequences:
            if not sequence.finished:
                self.scheduler.finish(sequence, reason, error)
                self._after_end(sequence)

    def gauges(self) -> Gauges:
        draft, model = self.draft.info if self.draft else None, self.verifier.model
        return Gauges(
            running=len(self.scheduler.running),
            starting=len(self.scheduler.starting) - len(self.scheduler.stalled),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.stalled),
            cache_usage=self.verifier.cache_usage,
            deepest=min(draft.max_speculation_depth, model.info.max_speculation_depth) if draft and model else 0,
            tasks=len(asyncio.all_tasks()),
            verifier_up=self.verifier.usable,
            draft_up=self.draft.usable if self.draft else None,
            model_name=model.name if model else "",
            draft_kind=draft.kind if draft else "",
            draft_name=draft.model_name if draft else "",
            draft_state_bytes=draft.state_bytes_per_sequence if draft else 0,
            circuits={peer.name: peer.circuit.seconds for peer in self._peers()},
            k=self.speculation.k,
            tau=self.speculation.tau,
            multiplier=self.speculation.multiplier,
            multiplier_modelled=self.speculation.multiplier_modelled,
            prices=self.config.prices,
        )

    # -- life --------------------------------------------------------------------------------------------------------

    async def handshake(self) -> None:
        """Meet the peers before serving. Raises MismatchError; peers that are not there yet are met later."""
        deadline = time.monotonic() + self.config.startup_patience
        for peer in self._peers():
            while True:
                try:
                    await peer.handshake()
                    break
                except (grpc.aio.AioRpcError, PeerLost):
                    if time.monotonic() >= deadline:
                        log.warning("starting without", peer=peer.name, address=peer.address)
                        break
                    await asyncio.sleep(0.1)

    def open(self) -> None:
        """Begin to serve."""
        loops = [*map(self._run, range(self.config.lanes)), self._releases.run(), self.verifier.maintain()]
        loops += [self.draft.maintain()] if self.draft else []
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def drain(self, hurry: asyncio.Task[None]) -> None:
        """Take nothing more and let what there is end; what has not after a while, or when it hurries, is told so."""
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
        await self._releases.send_last()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self._peers():
            await peer.close()

    def _peers(self) -> list[VerifierPeer | DraftPeer]:
        return [self.verifier, self.draft] if self.draft else [self.verifier]

    async def _run(self, lane: int) -> None:
        while True:
            await self._until_work(lane)
            try:
                await self.step(lane)
            except PeerLost as error:
                log.warning("round lost", reason=str(error))
            except Exception:  # a bug must not end everybody's rounds: these sequences fail, the next may not
                log.exception("round failed")
                self.finish(list(self.scheduler.running.values()), "error", RuntimeError("the round failed"))
                self.verifier.reset()

    async def _until_work(self, lane: int) -> None:
        while not self._has_work(lane):
            self._forget_last(lane)
            self._wakeup.clear()
            try:
                async with asyncio.timeout(None if self.scheduler.idle else self._pause()):
                    await self._wakeup.wait()
            except TimeoutError:
                self._patrol()

    def _has_work(self, lane: int) -> bool:
        scheduler = self.scheduler
        startable = scheduler.waiting and self._stirred and self._may_admit()
        return self.verifier.up and bool(self._rounds.has_next(lane) or scheduler.has_free or startable)

    def _stir(self) -> None:
        """Something happened: see whether there is work now."""
        self._stirred = True
        self._wakeup.set()

    def _may_admit(self) -> bool:
        now = time.monotonic()
        draft_may_come = self.draft is not None and not self.draft.up and now < self._met_verifier_at + _DRAFT_PATIENCE
        return self.verifier.usable and now >= self._admit_from and not draft_may_come

    def _pause(self) -> float:
        if self._may_admit() or not self.verifier.usable:
            return _PATROL
        return min(_PATROL, max(0.01, self._admit_from - time.monotonic()))

    def _patrol(self) -> None:
        """Nothing happened for a while although something should: see whether patience is over."""
        now = time.monotonic()
        if not self.verifier.usable:
            patience = self.verifier.patience(self.config.verifier_patience)
            if now - self.verifier.unusable_since > patience:
                lost = NoVerifier(f"the verifier did not come back within {patience:g} s")
                self.finish(list(self.scheduler.waiting), "error", lost)
        elif self.scheduler.reading and now - self._progress_at > self.verifier.limit(self.config.start_deadline):
            log.warning("no prompt is read", seconds=self.verifier.limit(self.config.start_deadline))
            self.verifier.reset()

    # -- a round -----------------------------------------------------------------------------------------------------

    async def step(self, lane: int) -> None:
        """Start what there is place for, and a lane's round. Raises PeerLost when the verifier goes away."""
        began = self._counted_until.pop(lane, None) or time.monotonic()
        if not self.scheduler.reading:
            self._progress_at = began
        await self._start(self._admitted())
        current = self._rounds.take(lane)
        if current is None:
            return
        try:
            await self._round(lane, current, began)
        except BaseException as error:
            self._forget_last(lane)
            self._rounds.forget_next(lane)
            # With the verifier its sequences are lost in the midst of it.
            if not isinstance(error, PeerLost):
                self.scheduler.end_round(current.batch)
            raise
        else:
            self.scheduler.end_round(current.batch)
        finally:
            self._wakeup.set()

    async def _round(self, lane: int, current: Round, began: float) -> None:
        """Propose, verify, commit, learn; `began` when the round before it was over."""
        await self._rounds.send(lane, current)
        if current.asked is None:
            return
        answer, asked_seconds = await self.verifier.answer(current.asked)
        await self._rounds.follow(lane)
        # While it waited behind the round before it, that one's time passed.
        early = max(0.0, began - current.sent_at)
        answer.timings.queue_seconds = max(0.0, answer.timings.queue_seconds - early)
        batch, proposals = current.sent, current.proposals
        self.speculation.settle(proposals, answer)
        shown = self.speculation.shown_by(batch, proposals, answer)
        kept = self._commit(self.scheduler.still(current.batch), answer, proposals)
        self._counted_until[lane] = ended = time.monotonic()
        seconds = ended - began
        self._account(lane, seconds, batch, proposals, answer.timings, asked_seconds - early)
        if proposals.decoding:
            self.metrics.compared(proposals.decoding, kept, seconds)
        took = self._took(lane, answer.over_at) or seconds
        self.speculation.learn(current.load, shown, took, proposals, answer.timings)

    def _forget_last(self, lane: int) -> None:
        """No round follows the lane's last one at once."""
        self._counted_until.pop(lane, None)
        self._over_at.pop(lane, None)

    def _took(self, lane: int, over_at: float) -> float | None:
        """Seconds of a round by the verifier's clock, because an answer may be read late and the next one at once.

        None for a lane's first round in a while.
        """
        before, self._over_at[lane] = self._over_at.get(lane), over_at
        return None if before is None else over_at - before

    def _admitted(self) -> list[Sequence]:
        if not self._may_admit():
            return []
        self._stirred = False
        starts = self.scheduler.admit(make_room=not self._releases.under_way)
        self.metrics.gave_way = self.scheduler.gave_way
        if self.scheduler.has_ended:
            self._releases.wake()
        return starts

    async def _start(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if not sequence.moments.admitted:
                sequence.moments.admitted = time.monotonic()
                self.metrics.queue_time.observe(sequence.moments.admitted - sequence.moments.arrived)
            sequence.draft_id = self.speculation.draft_for(sequence)
            await self.verifier.start(wire_start(sequence), self.config.verify_deadline)

    def _commit(self, batch: list[Sequence], answer: verifier_pb2.VerifyBatchResult, proposals: Proposals) -> int:
        """Returns how many tokens were kept of all that came."""
        now, kept = time.monotonic(), 0
        results = {result.sequence_id: result for result in answer.results}
        for sequence in batch:
            if sequence.state is not State.RUNNING:
                continue
            result, drafted = results.get(sequence.wire_id), proposals.drafted(sequence)
            if result is None:
                self._lose(sequence, "the verifier left it out of its answer")
            elif result.status.code != tensor_pb2.CODE_OK:
                self._refused(sequence, result.status, drafted)
            elif len(result.tokens) != result.accepted + 1 or result.accepted > drafted:
                self._lose(sequence, f"{result.accepted} of {drafted} accepted, but {len(result.tokens)} tokens came")
            else:
                kept += self._commit_one(sequence, result, drafted, now)
        return kept

    def _commit_one(self, sequence: Sequence, result: verifier_pb2.VerifyResult, drafted: int, now: float) -> int:
        try:
            logprobs = _logprobs_for(sequence, result.logprobs, len(result.tokens))
        except MismatchError as error:
            self._lose(sequence, str(error))
            return 0
        kept = self.scheduler.commit(sequence, list(result.tokens), drafted, logprobs)
        if drafted:
            self.metrics.drafted_block(drafted, result.accepted, kept)
        self._after_tokens(sequence, kept, now)
        return kept

    def _after_tokens(self, sequence: Sequence, kept: int, now: float) -> None:
        self.metrics.token_times(sequence, kept, now)
        if sequence.finished:
            self._after_end(sequence)
        elif sequence.unread_bytes > MOST_UNREAD_BYTES:
            self.finish([sequence], "error", ReaderTooSlow("the client leaves too much of this answer unread"))
        elif sequence.hears_rounds:
            sequence.listener()

    def _account(
        self,
        lane: int,
        seconds: float,
        batch: list[Sequence],
        proposals: Proposals,
        verified: verifier_pb2.Timings,
        asked_seconds: float,
    ) -> None:
        models = (proposals.model_seconds, verified.forward_seconds, verified.sample_seconds)
        asked = proposals.asked_seconds + asked_seconds
        parts = parts_of_round(seconds, models, proposals.waited_seconds, verified.queue_seconds, asked)
        self.metrics.round(lane, parts, len(batch), max(map(proposals.drafted, batch)))

    # -- what happens to sequences -----------------------------------------------------------------------------------

    def _on_started(self, message: verifier_pb2.Started) -> None:
        now = self._progress_at = time.monotonic()
        self._stir()
        waiting = self.scheduler.starting.get(message.sequence_id)
        if waiting is None:
            if message.status.code == tensor_pb2.CODE_OK:
                self._releases.add(message.sequence_id)
        elif message.status.code != tensor_pb2.CODE_OK:
            self._refused(waiting, message.status, drafted=0)
        elif message.base != len(waiting.tokens):
            self._lose(waiting, f"{len(waiting.tokens)} tokens were sent, the verifier committed {message.base}")
        else:
            self._first_token(waiting, message, now)

    def _on_standing(self, message: verifier_pb2.Standing) -> None:
        stage = _STAGES.get(message.stage)
        if stage is None:
            return
        if stage is not Stage.STALLED:
            self._progress_at = time.monotonic()
        for sequence_id in message.sequence_ids:
            self.scheduler.stands(sequence_id, stage)
        self._stir()

    def _first_token(self, sequence: Sequence, message: verifier_pb2.Started, now: float) -> None:
        try:
            logprobs = _logprobs_for(sequence, message.logprobs, 1)
            if sequence.lacks_prompt_logprobs:
                top = sequence.top_logprobs or 0
                count = len(sequence.prompt) - 1
                sequence.prompt_logprobs = logprobs_of(message.prompt_logprobs, count, top, ranked=True)
        except MismatchError as error:
            self._lose(sequence, str(error))
            return
        before = len(sequence.output)
        self.scheduler.started(message.sequence_id, message.token, message.cached_tokens, logprobs)
        if self.scheduler.unstarted:
            self._drain.started(now)
        else:
            self._drain.emptied()
        self._after_tokens(sequence, len(sequence.output) - before, now)

    def _refused(self, sequence: Sequence, status: tensor_pb2.ItemStatus, drafted: int) -> None:
        """The verifier says no to one item."""
        if status.code == tensor_pb2.CODE_RESOURCE_EXHAUSTED:
            if sequence.state is State.STARTING:
                self._admit_from = time.monotonic() + _FULL_PAUSE
            else:
                self.metrics.replays += 1
            self.scheduler.put_back(sequence)
            self._releases.wake()
            self._stir()
            return
        try:
            raise_for(status)
        except (InvalidRequest, NotFinite) as error:
            if drafted:  # the draft's block was wrong, the request was not
                sequence.k, sequence.automatic = 0, False
                self._lose(sequence, str(error))
            else:
                self.finish([sequence], "error", error)
        except Exception as error:
            self._lose(sequence, str(error))

    def _lose(self, sequence: Sequence, reason: str) -> None:
        self.metrics.replays += 1
        log.warning("replaying", sequence=sequence.wire_id, reason=reason)
        if not self.scheduler.lose(sequence):
            self.finish([sequence], "error", PeerLost(f"given up after several attempts: {reason}"))
        self._releases.wake()
        self._stir()

    def _after_end(self, sequence: Sequence) -> None:
        now = time.monotonic()
        if not self.scheduler.unstarted:
            self._drain.emptied()
        self.metrics.sequence_finished(sequence, now)
        self._releases.wake()
        self._stir()
        sequence.listener()

    # -- what happens to the verifier --------------------------------------------------------------------------------

    def _on_verifier(self, before: Model | None, model: Model) -> None:
        self.scheduler.capacity = min(self.config.max_batch, model.info.max_sequences or self.config.max_batch)
        if before is None or before.info.epoch != model.info.epoch:
            self._releases.forget()
            self._met_verifier_at = time.monotonic()
            if self.draft:
                self.draft.reset()
                self.draft.hurry()
        if before is not None and before.info.target_fingerprint != model.info.target_fingerprint:
            old, new = before.info.target_fingerprint, model.info.target_fingerprint
            changed = MismatchError(f"the verifier now serves another target: {new!r} instead of {old!r}")
            log.error("target changed", reason=str(changed))
            self.finish(list(self.scheduler.waiting), "error", changed)
        self._stir()

    def _on_prefilled(self) -> None:
        self._progress_at = time.monotonic()

    def _on_verifier_lost(self) -> None:
        self.metrics.replays += self.scheduler.held
        self._drain.emptied()
        given_up = self.scheduler.lose_all()
        self.finish(given_up, "error", PeerLost("the verifier was lost several times during this request"))
        self._stir()


def _logprobs_for(sequence: Sequence, message: verifier_pb2.Logprobs, tokens: int) -> abc.Sequence[Logprob]:
    """Those of new tokens; none if none are asked for. Raises MismatchError when others came."""
    return [] if sequence.top_logprobs is None else logprobs_of(message, tokens, sequence.top_logprobs)
