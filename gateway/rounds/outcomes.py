"""Applies the verifier's answers to sequences, which get tokens, end, or are lost and start again.

Does not know: when rounds run, or how long they take.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterable

import structlog

from gateway.errors import PeerLost, ReaderTooSlow
from gateway.metrics import Metrics
from gateway.rounds.admission import DrainRate
from gateway.rounds.drafting import DraftPlan
from gateway.rounds.messages import logprobs_of
from gateway.rounds.releases import Releases
from gateway.rounds.scheduler import Scheduler
from gateway.sequence import Logprob, Sequence, State
from spire.errors import InvalidRequest, MismatchError, NotFinite
from spire.rpc.errors import raise_for
from spire.v1 import tensor_pb2, verifier_pb2

# Seconds without Starts after the verifier refused one for lack of room. Usually a Start waits at the verifier.
_FULL_PAUSE = 0.05
# Bytes that a client may leave unread beyond the buffers of kernel and connection, before its sequence is ended.
MOST_UNREAD_BYTES = 2 << 20

log = structlog.get_logger("gateway")


class Outcomes:
    """Applies the verifier's answers to sequences, updates metrics, calls listeners, and `stir` if work may follow."""

    def __init__(
        self, scheduler: Scheduler, metrics: Metrics, releases: Releases, drain: DrainRate, stir: Callable[[], None]
    ):
        self._scheduler, self._metrics, self._releases = scheduler, metrics, releases
        self._drain, self._stir = drain, stir
        # No Start is sent before this moment.
        self.admit_from = 0.0
        # The verifier's process that was lost when the suspects were computed.
        self._lost_epoch = ""

    def commit(self, batch: list[Sequence], answer: verifier_pb2.VerifyBatchResult, plan: DraftPlan) -> int:
        """Commit a round's tokens to the sequences of its batch. Return the number of tokens that became output."""
        now, kept = time.monotonic(), 0
        results = {result.sequence_id: result for result in answer.results}
        for sequence in batch:
            if sequence.state is not State.RUNNING:
                continue
            result, drafted = results.get(sequence.wire_id), plan.drafted(sequence)
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
        kept = self._scheduler.commit(sequence, list(result.tokens), drafted, logprobs)
        if drafted:
            self._metrics.drafted_block(drafted, result.accepted, kept)
        self._after_tokens(sequence, kept, now)
        return kept

    def started(self, message: verifier_pb2.Started, now: float) -> None:
        """Apply the verifier's answer to a Start message: the first token, or a refusal."""
        waiting = self._scheduler.starting.get(message.sequence_id)
        if waiting is None:
            if message.status.code == tensor_pb2.CODE_OK:
                self._releases.add(message.sequence_id)
        elif message.status.code != tensor_pb2.CODE_OK:
            self._refused(waiting, message.status, drafted=0)
        elif message.base != len(waiting.tokens):
            self._lose(waiting, f"{len(waiting.tokens)} tokens were sent, the verifier committed {message.base}")
        else:
            self._first_token(waiting, message, now)

    def _first_token(self, sequence: Sequence, message: verifier_pb2.Started, now: float) -> None:
        try:
            logprobs = _logprobs_for(sequence, message.logprobs, 1)
            if sequence.lacks_prompt_logprobs:
                top, count = sequence.top_logprobs or 0, len(sequence.prompt) - 1
                sequence.prompt_logprobs = logprobs_of(message.prompt_logprobs, count, top, ranked=True)
        except MismatchError as error:
            self._lose(sequence, str(error))
            return
        kept = self._scheduler.started(sequence, message.token, message.cached_tokens, logprobs)
        if self._scheduler.unstarted:
            self._drain.started(now)
        else:
            self._drain.emptied()
        self._after_tokens(sequence, kept, now)

    def _after_tokens(self, sequence: Sequence, kept: int, now: float) -> None:
        self._metrics.token_times(sequence, kept, now)
        if sequence.finished:
            self._after_end(sequence)
        elif sequence.unread_bytes > MOST_UNREAD_BYTES:
            self.finish([sequence], "error", ReaderTooSlow("the client leaves too much of this answer unread"))
        elif sequence.hears_rounds:
            sequence.listener()

    def finish(self, sequences: Iterable[Sequence], reason: str, error: Exception | None = None) -> None:
        """End sequences in any state, with this finish reason and error, and release their places."""
        for sequence in sequences:
            if not sequence.finished:
                self._scheduler.finish(sequence, reason, error)
                self._after_end(sequence)

    def _after_end(self, sequence: Sequence) -> None:
        if not self._scheduler.unstarted:
            self._drain.emptied()
        self._metrics.sequence_finished(sequence, time.monotonic())
        self._releases.wake()
        self._stir()
        sequence.listener()

    def _refused(self, sequence: Sequence, status: tensor_pb2.ItemStatus, drafted: int) -> None:
        """Handle an error status of the verifier for one sequence."""
        if status.code == tensor_pb2.CODE_RESOURCE_EXHAUSTED:
            if sequence.state is State.STARTING:
                self.admit_from = time.monotonic() + _FULL_PAUSE
            else:
                self._metrics.replays += 1
            self._scheduler.put_back(sequence)
            self._releases.wake()
            self._stir()
            return
        try:
            raise_for(status)
        except (InvalidRequest, NotFinite) as error:
            if drafted:  # the draft's block was wrong, not the request
                sequence.k, sequence.automatic = 0, False
                self._lose(sequence, str(error))
            else:
                self.finish([sequence], "error", error)
        except Exception as error:
            self._lose(sequence, str(error))

    def _lose(self, sequence: Sequence, reason: str) -> None:
        self._metrics.replays += 1
        log.warning("replaying", sequence=sequence.wire_id, reason=reason)
        if not self._scheduler.lose(sequence):
            self.finish([sequence], "error", PeerLost(f"given up after several attempts: {reason}"))
        self._releases.wake()
        self._stir()

    def lose_all(self, epoch: str) -> None:
        """Queue all sequences again after the loss of the verifier, whose process is named `epoch`."""
        self._metrics.replays += self._scheduler.held
        self._drain.emptied()
        if not self._scheduler.suspects:
            self._lost_epoch = epoch
        self._scheduler.lose_all()

    def settle(self, epoch: str) -> None:
        """Fail the suspects of too many deaths, once a verifier serves. A broken connection to the same is no death."""
        failing = self._scheduler.settle(died=epoch != self._lost_epoch)
        self.finish(failing, "error", PeerLost("the verifier was lost several times during this request"))


def _logprobs_for(sequence: Sequence, message: verifier_pb2.Logprobs, tokens: int) -> abc.Sequence[Logprob]:
    """Return the logprobs of new tokens, [] if none are requested. Raises MismatchError if sizes differ."""
    return [] if sequence.top_logprobs is None else logprobs_of(message, tokens, sequence.top_logprobs)
