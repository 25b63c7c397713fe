"""A sequence: one choice of a request, with its tokens, sampling and state. Only the scheduler changes the state.

    WAITING ──schedule──► STARTING ──Started──► RUNNING ──► FINISHED
       ▲                     │                     │
       └── lose, give way ───┴─────────────────────┘      (finish is legal from every state)

A sequence that the verifier lost starts again from prompt + output. Each start is a new life with a new id at the model
services (wire id), so that a late message about a former life is never mistaken for one about the new life.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Literal

from spire.v1.tensor_pb2 import RULE_BLOCK, Sampling
from spire.v1.verifier_pb2 import Adjustments

Rule = Literal["rejection", "block", "invariant"]
# Drafting stops where one more token costs more than it is worth, where too little of a block probably stands, or at k.
Stop = Literal["cost", "threshold", "off"]
# The rule that is used at temperature 0, whatever the request says.
GREEDY = "greedy"
# The largest automatic k: the most that our drafts support, which pays only in small batches.
DEEPEST = 16
# Tokens that a preempted sequence generates before it can be preempted again: otherwise it would only restart.
LEAST_RUN = 16


class State(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"


class Stage(IntEnum):
    """The progress of a STARTING sequence at the verifier, as last reported."""

    SENT = 0
    # The verifier has no room yet: the sequence waits there, behind sequences sent earlier.
    STALLED = 1
    ADMITTED = 2
    # The prompt is being computed.
    COMPUTED = 3


@dataclass(frozen=True, slots=True)
class Logprob:
    """The logprob (natural logarithm) of a token, and (token, logprob) of the likeliest tokens at its position.

    `rank` is 1 for the likeliest token, and 0 if unknown: only tokens of prompts have a rank.
    """

    token: float
    # Any type of sequence: `rounds/messages` has a compact one.
    top: abc.Sequence[tuple[int, float]]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round for one sequence: `tokens` new tokens, the first at index `begin` of the output.

    The target accepted `accepted` of `drafted` draft tokens and added one token of its own. `tokens` is less than
    accepted + 1 if the output ends within the round.
    """

    begin: int
    tokens: int
    drafted: int
    accepted: int


# Approximate memory in bytes of an output token with its origin and round, and of one logprob with its token.
_TOKEN_BYTES, _LOGPROB_BYTES = 200, 120


@dataclass(slots=True, eq=False)
class Sequence:
    id: str
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    # The most draft tokens of a round; 0 decodes plainly.
    k: int = 0
    end_tokens: frozenset[int] = frozenset()
    # True if the gateway chooses k anew for every round.
    automatic: bool = False
    # By which rule the draft stops before k tokens.
    stop: Stop = "off"
    # True if the verifier withholds the activations of the newest round or Start from the draft.
    paused: bool = False
    adjustments: Adjustments | None = None
    # The number of likeliest tokens reported with each token's logprob; None: no logprobs at all.
    top_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    # The verifier shares computed prefixes only between sequences of the same salt.
    cache_salt: str = ""

    # The API key and the request, between which places are shared fairly; the order of arrival. Set by the scheduler.
    key: str = ""
    request: int = 0
    arrival: int = 0

    state: State = State.WAITING
    stage: Stage = Stage.SENT
    output: list[int] = field(default_factory=list)
    # For each output token, whether it was a draft token.
    from_draft: list[bool] = field(default_factory=list)
    # For each output token, if logprobs are asked for.
    logprobs: list[Logprob] = field(default_factory=list)
    # For each token of the prompt but the first; None until the verifier has sent them.
    prompt_logprobs: abc.Sequence[Logprob] | None = None
    finish_reason: str | None = None
    error: Exception | None = None

    # The number of the current life, the output length at its begin, and whether `Scheduler.put_back` was ever called.
    life: int = 0
    life_began: int = 0
    came_back: bool = False
    round: int = 0
    # Rounds planned and not ended: at most two, the one that the engine runs and the next.
    under_way: int = 0
    draft_id: str = ""

    # Tokens of the prompt that the verifier copied from another sequence's prefix instead of computing them.
    cached_tokens: int = 0
    # Lives lost since the last new token while the verifier computed the sequence: after too many, the sequence fails.
    fruitless_lives: int = 0
    rounds: list[RoundResult] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    # drafted_histogram[d], accepted_histogram[a]: the number of rounds in which d tokens were drafted, a accepted.
    drafted_histogram: list[int] = field(default_factory=list)
    accepted_histogram: list[int] = field(default_factory=list)
    # accepted_histogram of the rounds that max_tokens left room for k draft tokens: τ at k is measured from these.
    full_depth_histogram: list[int] = field(default_factory=list)

    # Times of events in seconds of the monotonic clock; 0 before the event. Written by the engine and `Metrics`.
    arrived_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    listener: Callable[[], None] = lambda: None
    # True: the listener is called after every round; False: only when the sequence ends.
    hears_rounds: bool = True
    # The number of output tokens that the listener has read.
    heard: int = 0

    @property
    def by_block(self) -> bool:
        """True if the target judges the sequence's draft tokens by the block rule."""
        return bool(self.sampling.temperature) and self.sampling.rule == RULE_BLOCK

    @property
    def stalled(self) -> bool:
        """True if the sequence waits for room at the verifier."""
        return self.state is State.STARTING and self.stage is Stage.STALLED

    @property
    def computed(self) -> bool:
        """True if the verifier may be computing the sequence: if the verifier dies, the sequence may be the cause."""
        if self.state is State.STARTING:
            return self.stage is Stage.COMPUTED
        return self.state is State.RUNNING and self.under_way > 0

    @property
    def may_give_way(self) -> bool:
        return not self.came_back or len(self.output) - self.life_began >= LEAST_RUN

    @property
    def wire_id(self) -> str:
        """The id of the sequence at the model services, new for each life, that is each start at the verifier."""
        return f"{self.id}.{self.life}"

    @property
    def base(self) -> int:
        """The number of committed positions of a running sequence: all its tokens but the newest."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def unread_bytes(self) -> int:
        """The approximate bytes of output tokens that the listener has not read; 0 unless `hears_rounds`."""
        if not self.hears_rounds:
            return 0
        alternatives = 0 if self.top_logprobs is None else 1 + self.top_logprobs
        return (len(self.output) - self.heard) * (_TOKEN_BYTES + alternatives * _LOGPROB_BYTES)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True if prompt logprobs are requested and the verifier has not sent them since the first start."""
        return self.wants_prompt_logprobs and self.prompt_logprobs is None

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and of the output so far, which a Start message contains."""
        return self.prompt + self.output

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.output)

    @property
    def room(self) -> int:
        """The most draft tokens that max_tokens allows in the next round, which also adds one token of the target."""
        return max(0, self.tokens_left - 1)

    @property
    def depth(self) -> int:
        """The number of draft tokens to request in the next round: k, limited by max_tokens."""
        return min(self.k, self.room)

    @property
    def speculates(self) -> bool:
        """True if any round of the sequence may be drafted."""
        return self.automatic or self.k > 0

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED
