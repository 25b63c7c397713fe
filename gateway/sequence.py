"""One choice of one request: its tokens, how it is sampled, where it stands. Only the scheduler changes its state.

    WAITING ──schedule──► STARTING ──Started──► RUNNING ──► FINISHED
       ▲                     │                     │
       └── lose, give way ───┴─────────────────────┘      (finish is legal from every state)

A lost sequence is started again from prompt + output under a new wire id, so nothing of its former life at a model
service can meet the new one.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Literal

from spire.v1.verifier_pb2 import Adjustments

Rule = Literal["rejection", "block", "invariant"]
# What every rule is at temperature 0.
GREEDY = "greedy"


# Tokens that a sequence which had to give way generates before it may have to again: else it only starts.
LEAST_RUN = 16


class State(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"


class Stage(IntEnum):
    """How far a STARTING sequence has come at the verifier, as that has told."""

    SENT = 0
    # There is no room yet: it waits there, behind those that were sent before it.
    STALLED = 1
    ADMITTED = 2
    # Its prompt is being computed.
    COMPUTED = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence is sampled. `seed` is always there: the gateway draws one when the caller gave none."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    min_p: float = 0.0
    rule: Rule = "rejection"

    @property
    def rule_used(self) -> str:
        return self.rule if self.temperature else GREEDY


# In some way that does not take more memory than need be.
Top = abc.Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural logarithm of a token's probability, and (token, logprob) of the likeliest ones at its position.

    `rank` is 1 for the likeliest token, and 0 where it is not known: only prompts' tokens have one.
    """

    token: float
    top: Top
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did for a sequence: it gave `tokens` of its output from place `begin` on.

    Of `drafted` draft tokens the target accepted `accepted`; one more is its own. Where the output ends in the midst of
    a round, `tokens` is less than accepted + 1.
    """

    begin: int
    tokens: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class Moments:
    """When things happened, in seconds of the gateway's own clock. Written by the engine, 0 until it happened."""

    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0


# About what Python takes for an output token, its origin and its round, and for a token with its logprob.
_TOKEN_BYTES, _LOGPROB_BYTES = 200, 120


def _no_listener() -> None:
    return None


@dataclass(slots=True, eq=False)
class Sequence:
    id: str
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    # Most draft tokens of a round; 0 decodes plainly.
    k: int = 0
    end_tokens: frozenset[int] = frozenset()
    # Whether k is chosen anew for every round.
    automatic: bool = False
    # Whether the draft was not told what its last round gave.
    quiet: bool = False
    adjustments: Adjustments | None = None
    # How many of the likeliest tokens come with each token's logprob; None asks for no logprobs at all.
    top_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    # Computed prefixes are shared with sequences of the same salt.
    cache_salt: str = ""

    # Whose it is, and which request's: places are shared between them. `arrival` orders all. Set by the scheduler.
    key: str = ""
    request: int = 0
    arrival: int = 0

    state: State = State.WAITING
    stage: Stage = Stage.SENT
    output: list[int] = field(default_factory=list)
    # Of each output token: whether the draft guessed it.
    from_draft: list[bool] = field(default_factory=list)
    # Of each output token, if they are asked for.
    logprobs: list[Logprob] = field(default_factory=list)
    # Of the prompt's tokens but the first; None until they have come.
    prompt_logprobs: abc.Sequence[Logprob] | None = None
    finish_reason: str | None = None
    error: Exception | None = None

    # The life under the current wire id, how much output it began with, and whether it had to give way before.
    life: int = 0
    life_began: int = 0
    came_back: bool = False
    round: int = 0
    # Its rounds that are under way. Where they are two, each gives one token.
    under_way: int = 0
    draft_id: str = ""

    # Of the prompt, copied from what the verifier held already.
    cached_tokens: int = 0
    # Lives since the last new token that ended while it was computed: whoever ends each one is given up.
    fruitless_lives: int = 0
    rounds: list[Round] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    # accepted_histogram[a] = rounds in which a draft tokens were accepted.
    accepted_histogram: list[int] = field(default_factory=list)
    # The same of rounds with room for k tokens before max_tokens: what τ at k is the mean of.
    full_depth_histogram: list[int] = field(default_factory=list)

    moments: Moments = field(default_factory=Moments)
    listener: Callable[[], None] = _no_listener
    # Whether the listener hears of every round or of the end alone.
    hears_rounds: bool = True
    # Output tokens that the listener has taken, if it hears of them.
    heard: int = 0

    @property
    def stalled(self) -> bool:
        """Whether it waits for room at the verifier."""
        return self.state is State.STARTING and self.stage is Stage.STALLED

    @property
    def computed(self) -> bool:
        """Whether the verifier computes it, as far as is known: only then may it be why that died."""
        if self.state is State.STARTING:
            return self.stage is Stage.COMPUTED
        return self.state is State.RUNNING and self.under_way > 0

    @property
    def may_give_way(self) -> bool:
        return not self.came_back or len(self.output) - self.life_began >= LEAST_RUN

    @property
    def wire_id(self) -> str:
        """Its name at the model services, a new one for each life."""
        return f"{self.id}.{self.life}"

    @property
    def base(self) -> int:
        """Positions whose cache is committed while it runs: all but the newest token."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def unread_bytes(self) -> int:
        """What is kept of tokens that a listener to every round has not taken."""
        if not self.hears_rounds:
            return 0
        alternatives = 0 if self.top_logprobs is None else 1 + self.top_logprobs
        return (len(self.output) - self.heard) * (_TOKEN_BYTES + alternatives * _LOGPROB_BYTES)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the next Start asks for them: what came in an earlier life is kept."""
        return self.wants_prompt_logprobs and self.prompt_logprobs is None

    @property
    def newest_token(self) -> int:
        return self.output[-1]

    @property
    def tokens(self) -> list[int]:
        """What a (re)start begins from."""
        return self.prompt + self.output

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.output)

    @property
    def room(self) -> int:
        """Draft tokens that the next round has a use for: it yields one token more than it drafts."""
        return max(0, self.tokens_left - 1)

    @property
    def depth(self) -> int:
        """Speculation depth of the next round."""
        return min(self.k, self.room)

    @property
    def speculates(self) -> bool:
        """Whether any of its rounds may be drafted."""
        return self.automatic or self.k > 0

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED
