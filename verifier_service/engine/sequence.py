"""The verifier's state of one sequence, except its KV cache; the check of a Start; errors about sequences."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from spire.errors import InvalidRequest, NotFinite, OutOfCapacity, StaleBlock, UnknownSequence
from spire.rpc.limits import MAX_LOGPROBS, MAX_SEQUENCE_ID
from spire.rpc.sampling import check_sampling
from spire.v1 import tensor_pb2, verifier_pb2 as pb
from verifier_service.sampling.grammar import Matcher
from verifier_service.sampling.histories import check_adjustments
from verifier_service.sampling.logprobs import Scores

Reply = Callable[[pb.RoundsResponse], None]
# Tokens that a resumed sequence generates before it may be preempted again.
LEAST_RUN = 16


@dataclass(frozen=True)
class StartTask:
    start: pb.Start
    gateway: str
    # `reply` receives the answer, `tell` the stages that the Start reaches before the answer.
    reply: Reply
    tell: Reply
    matcher: Matcher | None = None
    received: float = field(default_factory=time.perf_counter)

    def stands(self, stage: pb.Stage) -> None:
        """Tell the gateway that the Start has reached this stage."""
        self.tell(standing(self.start.sequence_id, stage))


@dataclass
class HeldSequence:
    """A sequence in a slot, prefilling until `started` is set; then its newest token is at `cache.lengths[slot]`."""

    start: pb.Start
    slot: int
    gateway: str
    # Callbacks of its StartTask.
    reply: Reply
    tell: Reply
    prompt_L: Tensor
    received: float
    timings: pb.Timings = field(default_factory=pb.Timings)
    started: pb.Started | None = None
    round: int = 0
    last_base: int = 0
    last_answer: pb.VerifyResult | None = None
    poisoned: bool = False
    # True once the search for a prefix to copy is over; the number of positions to compute before the copy; the
    # number of positions copied.
    compared: bool = False
    before_copy: int = 0
    cached_tokens: int = 0
    # Logprobs of the prompt's tokens, one entry per chunk, if the Start asks for them.
    scores: list[Scores] = field(default_factory=list)
    # By position: the prompt, then the generated tokens.
    tokens: list[int] = field(init=False)
    # Copied from `start`, which makes a new string at each access.
    id: str = field(init=False)
    draft_id: str = field(init=False)
    # True if a block with draft tokens must carry their q.
    needs_q: bool = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.start.tokens)
        self.id, self.draft_id = self.start.sequence_id, self.start.draft_id
        sampling = self.start.sampling
        self.needs_q = sampling.temperature > 0 and sampling.rule != tensor_pb2.RULE_INVARIANT

    @property
    def may_give_way(self) -> bool:
        """True if the sequence may be preempted: one that gave way before only after it has generated LEAST_RUN."""
        return not self.start.came_back or len(self.tokens) - len(self.start.tokens) >= LEAST_RUN

    @property
    def newest(self) -> int:
        return self.tokens[-1]

    def stored_answer(self, round_: int, asked_base: int, base: int) -> pb.VerifyResult | None:
        """Return the stored answer to a repeated block, None for the next block. Raises StaleBlock for other blocks."""
        if self.started is None:
            raise StaleBlock(f"sequence {self.id} is still prefilling")
        if self.last_answer is not None and round_ == self.round and asked_base in (0, self.last_base):
            return self.last_answer
        if round_ != self.round + 1:
            raise StaleBlock(f"sequence {self.id}: round {round_} came, round {self.round + 1} is next")
        if asked_base not in (0, base):
            raise StaleBlock(f"sequence {self.id}: base {asked_base} came, {base} positions are committed")
        return None

    def advance(self, round_: int, base: int, tokens: list[int]) -> None:
        """Append the new tokens of a round. The caller must set `last_answer` before the next block is read."""
        self.round, self.last_base, self.last_answer = round_, base, None
        self.tokens += tokens


def check_start(start: pb.Start, vocab_size: int, max_context: int) -> None:
    """Raise InvalidRequest if this Start can never be served."""
    if not start.sequence_id:
        raise InvalidRequest("sequence_id is empty", "sequence_id")
    if (length := len(start.sequence_id)) > MAX_SEQUENCE_ID:
        raise InvalidRequest(f"sequence_id has {length} characters, at most {MAX_SEQUENCE_ID} are kept", "sequence_id")
    if not start.tokens:
        message = f"sequence {start.sequence_id} has no tokens: a prompt has at least the start token"
        raise InvalidRequest(message, "tokens")
    if len(start.tokens) > max_context:
        raise InvalidRequest(f"{len(start.tokens)} tokens do not fit the context of {max_context}", "tokens")
    if (largest := max(start.tokens)) >= vocab_size:
        raise InvalidRequest(f"token {largest} is outside the vocabulary of {vocab_size}", "tokens")
    if start.prompt_tokens > len(start.tokens):
        message = f"prompt_tokens is {start.prompt_tokens}, but {len(start.tokens)} tokens came"
        raise InvalidRequest(message, "prompt_tokens")
    if start.logprobs > MAX_LOGPROBS:
        message = f"logprobs is {start.logprobs}: at most {MAX_LOGPROBS} alternatives are reported"
        raise InvalidRequest(message, "logprobs")
    check_sampling(start.sampling)
    check_adjustments(start.adjustments, vocab_size)


def standing(sequence_id: str, stage: pb.Stage) -> pb.RoundsResponse:
    """Return the message that tells a gateway which stage a Start has reached."""
    return pb.RoundsResponse(standing=pb.Standing(sequence_ids=[sequence_id], stage=stage))


def preempted(sequence_id: str) -> OutOfCapacity:
    """Error for a preempted sequence."""
    return OutOfCapacity(
        f"sequence {sequence_id} was preempted: start it again from its tokens, it waits for room then"
    )


def step_failed(sequence_id: str) -> UnknownSequence:
    """Error for a sequence of a failed step. The cause is only logged: a library's message may quote any data."""
    return UnknownSequence(f"a step with sequence {sequence_id} failed: start it again from its tokens")


def not_finite(sequence: HeldSequence) -> NotFinite:
    """Error for non-finite logits or hidden states."""
    return NotFinite(f"the target's numbers for sequence {sequence.id} are not finite")
