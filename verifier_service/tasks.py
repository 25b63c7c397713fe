"""What is handed to the engine's thread. Guesses are asked for with `spire.drafting.ProposeTask`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spire.v1 import draft_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.batch import Item
from verifier_service.grammar import Matcher
from verifier_service.sequence import Reply, standing


@dataclass(frozen=True)
class StartTask:
    start: pb.Start
    gateway: str
    # `reply` takes its answer, `tell` how far it has come before that.
    reply: Reply
    tell: Reply
    matcher: Matcher | None = None
    received: float = field(default_factory=time.perf_counter)

    def stands(self, stage: pb.Stage) -> None:
        """Tell its gateway."""
        self.tell(standing(self.start.sequence_id, stage))


@dataclass
class VerifyTask:
    """One VerifyBatch, with a result per item once it has been worked on."""

    batch: pb.VerifyBatch
    gateway: str
    reply: Reply
    received: float = field(default_factory=time.perf_counter)
    # By index of their items.
    results: dict[int, pb.VerifyResult] = field(default_factory=dict)
    # Whether drafts have been asked for what its items want of them, how many of these orders are under way, what was
    # decoded plainly for want of a guess, and what the draft that took longest told of its work.
    asked: bool = False
    orders: int = 0
    undrafted: dict[str, pb.Undrafted] = field(default_factory=dict)
    drafting: pb.Timings = field(default_factory=pb.Timings)
    # From asking to the last answer.
    drafting_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.items = [Item.read(item, index) for index, item in enumerate(self.batch.items)]
        self.sequence_ids = frozenset(item.sequence_id for item in self.items)


@dataclass(frozen=True)
class GuessTask:
    """What a draft answered to an order. `read` raises DecodeError where that are no sound bytes."""

    draft_id: str
    read: Callable[[], draft_pb2.ProposeBatchResult]
    received: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class CallTask:
    """Anything rare: runs between two steps on the engine's thread."""

    function: Callable[[], Any]
    done: Future[Any]
