"""The tasks that other threads submit to the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spire.v1 import draft_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.engine.batch import Item
from verifier_service.engine.sequence import Reply, standing
from verifier_service.sampling.grammar import Matcher


@dataclass(frozen=True)
class StartTask:
    start: pb.Start
    gateway: str
    # `reply` takes the answer, `tell` the stages that the Start reaches before that.
    reply: Reply
    tell: Reply
    matcher: Matcher | None = None
    received: float = field(default_factory=time.perf_counter)

    def stands(self, stage: pb.Stage) -> None:
        """Tell the gateway that the Start has reached this stage."""
        self.tell(standing(self.start.sequence_id, stage))


@dataclass
class VerifyTask:
    """One VerifyBatch, and the results of its items once a step has run them."""

    batch: pb.VerifyBatch
    gateway: str
    reply: Reply
    received: float = field(default_factory=time.perf_counter)
    # item index -> result
    results: dict[int, pb.VerifyResult] = field(default_factory=dict)
    # Whether its draft requests have been placed, how many of them are `awaited`, why blocks are decoded plainly that
    # were to be drafted (by sequence id), and the timings of the draft with the longest forward.
    asked: bool = False
    awaited: int = 0
    undrafted: dict[str, pb.Undrafted] = field(default_factory=dict)
    drafting: pb.Timings = field(default_factory=pb.Timings)
    # From the draft request to its reply, the longest of all.
    drafting_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.items = [Item.read(item, index) for index, item in enumerate(self.batch.items)]
        self.sequence_ids = frozenset(item.sequence_id for item in self.items)


@dataclass(frozen=True)
class ReplyTask:
    draft_id: str
    reply: draft_pb2.DraftReply
    received: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class CallTask:
    """A call that runs on the engine's thread between two steps, for rare work."""

    function: Callable[[], Any]
    done: Future[Any]
