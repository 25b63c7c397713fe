"""What is handed to the engine's thread. Guesses are asked for with `spire.drafting.ProposeTask`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spire.v1 import verifier_pb2 as pb
from verifier_service.grammar import Matcher
from verifier_service.sequence import Reply


@dataclass(frozen=True)
class StartTask:
    start: pb.Start
    gateway: str
    reply: Reply
    matcher: Matcher | None = None
    received: float = field(default_factory=time.perf_counter)


@dataclass
class VerifyTask:
    """One VerifyBatch, with a result per item once it has been worked on."""

    batch: pb.VerifyBatch
    gateway: str
    reply: Reply
    received: float = field(default_factory=time.perf_counter)
    results: list[pb.VerifyResult] = field(default_factory=list)


@dataclass(frozen=True)
class CallTask:
    """Anything rare: runs between two steps on the engine's thread."""

    function: Callable[[], Any]
    done: Future[Any]
