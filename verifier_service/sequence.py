"""What the verifier knows of one sequence besides its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from spire.drafting import Guess
from spire.errors import InvalidRequest, NotFinite, OutOfCapacity, StaleBlock, UnknownSequence
from spire.rpc.limits import MAX_LOGPROBS, MAX_SEQUENCE_ID
from spire.rpc.sampling import check_sampling
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.histories import check_adjustments
from verifier_service.logprobs import Scores

Reply = Callable[[pb.RoundsResponse], None]
# Tokens that a sequence which was sent away for want of room generates before it may be sent away again.
LEAST_RUN = 16


@dataclass
class Sequence:
    """Prefilling until `started` is set; then the newest token stands at the cache's committed length."""

    start: pb.Start
    slot: int
    gateway: str
    # As of its StartTask.
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
    # Whether its prompt was compared with what others hold, and how much of it was copied from one of them.
    compared: bool = False
    cached_tokens: int = 0
    # Of the prompt's tokens, chunk by chunk, if they are asked for.
    scores: list[Scores] = field(default_factory=list)
    # By position: the prompt, then what was generated.
    tokens: list[int] = field(init=False)
    # Of `start`, where each look makes another string.
    id: str = field(init=False)
    draft_id: str = field(init=False)
    # Whether a block has to say what its tokens were drawn from.
    needs_q: bool = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.start.tokens)
        self.id, self.draft_id = self.start.sequence_id, self.start.draft_id
        sampling = self.start.sampling
        self.needs_q = sampling.temperature > 0 and sampling.rule != tensor_pb2.RULE_INVARIANT

    @property
    def may_give_way(self) -> bool:
        """Whether it has run for a while since it was sent away: else all that it does is to start again."""
        came_back = 0 < self.start.prompt_tokens < len(self.start.tokens)
        return not came_back or len(self.tokens) - len(self.start.tokens) >= LEAST_RUN

    @property
    def newest(self) -> int:
        return self.tokens[-1]

    def stored_answer(self, round_: int, asked_base: int, base: int) -> pb.VerifyResult | None:
        """The answer of a repeated block, None when the block is the next one. Raises StaleBlock when neither."""
        if self.started is None:
            raise StaleBlock(f"sequence {self.id} is still prefilling")
        if self.last_answer is not None and round_ == self.round and asked_base in (0, self.last_base):
            return self.last_answer
        if round_ != self.round + 1:
            raise StaleBlock(f"sequence {self.id}: round {round_} came, round {self.round + 1} is next")
        if asked_base not in (0, base):
            raise StaleBlock(f"sequence {self.id}: base {asked_base} came, {base} positions are committed")
        return None

    def check_guess(self, guess: Guess, base: int) -> None:
        """Raises StaleBlock unless what is asked for comes right after the newest token."""
        if self.started is None:
            raise StaleBlock(f"sequence {self.id} is still prefilling")
        if (guess.base, guess.newest_token) != (base, self.newest):
            raise StaleBlock(
                f"sequence {self.id}: token {guess.newest_token} came as the newest at base {guess.base}, "
                f"it is token {self.newest} at base {base}"
            )

    def advance(self, round_: int, base: int, tokens: list[int]) -> None:
        """Take over a round's outcome. Its answer is written before anybody may ask for it again."""
        self.round, self.last_base, self.last_answer = round_, base, None
        self.tokens += tokens


def check_start(start: pb.Start, vocab_size: int, max_context: int) -> None:
    """Raises InvalidRequest when this Start can never be served."""
    if not start.sequence_id:
        raise InvalidRequest("sequence_id is empty", "sequence_id")
    if len(start.sequence_id) > MAX_SEQUENCE_ID:
        length = len(start.sequence_id)
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
    """How far a Start has come."""
    return pb.RoundsResponse(standing=pb.Standing(sequence_ids=[sequence_id], stage=stage))


def preempted(sequence_id: str) -> OutOfCapacity:
    """What is said to whoever asks for one that had to give way."""
    return OutOfCapacity(
        f"sequence {sequence_id} was preempted: start it again from its tokens, it waits for room then"
    )


def step_failed(sequence_id: str) -> UnknownSequence:
    """What is said when a step came to nothing. Why is for the log alone: a library's words may quote anything."""
    return UnknownSequence(f"a step with sequence {sequence_id} failed: start it again from its tokens")


def not_finite(sequence: Sequence) -> NotFinite:
    """What is said when a forward gave numbers that are none."""
    return NotFinite(f"the target's numbers for sequence {sequence.id} are not finite")
