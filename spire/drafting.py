"""What is asked of a draft, how it guesses, and what it answers: the same whichever model guesses, and wherever.

Drafting is k passes, each feeding one token per sequence and drawing the next from the draft's own distribution.

Shapes: B sequences, K passes, V vocabulary, M candidates kept of a distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spire.errors import RequestError
from spire.model.lost_device import end_if_device_lost
from spire.randomness import Purpose
from spire.sampling import SamplingRows, Share, draw, pick, probabilities, top_m, with_invariant
from spire.v1.verifier_pb2 import RingSlice

# The deepest block that any draft of ours proposes.
MAX_SPECULATION_DEPTH = 16


@dataclass(slots=True)
class Guess:
    """One sequence's place in a batch to draft for: `newest_token` stands at position `base`."""

    sequence_id: str
    base: int
    newest_token: int


@dataclass(frozen=True)
class Drafted:
    """k tokens per sequence [B, k] and the distributions they were drawn from, [B, k, m].

    Without ids m is the whole vocabulary. Where all sequences are under the invariant rule there are none: nobody asks.
    """

    tokens_BK: Tensor
    ids_BKM: Tensor | None
    probs_BKM: Tensor | None
    # Where `probs_BKM` lies in the q_ring, if it was written there.
    place: RingSlice | None = None


@dataclass
class ProposeTask:
    """A batch to draft for: B guesses, their sampling rows, the depth of the deepest.

    `absorbing_seconds`: what the model took, since it arrived, for activations that it needed.
    """

    guesses: list[Guess]
    rows: SamplingRows
    k: int
    done: Future[ProposeAnswer] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    absorbing_seconds: float = 0.0
    # The gateway that asks, where one does.
    asker: str = ""


@dataclass(frozen=True)
class ProposeAnswer:
    """`drafted` has a row for each guess in `ready`; the others have an error in `refused`."""

    drafted: Drafted | None
    ready: list[int]
    refused: dict[int, RequestError]
    queue_seconds: float
    forward_seconds: float


def answer(
    task: ProposeTask,
    check: Callable[[Guess], None],
    propose: Callable[[list[Guess], int, SamplingRows], Drafted],
) -> float:
    """Draft for whoever passes `check`, on the thread that calls; return the seconds it took.

    The task is answered whatever goes wrong: one sequence that cannot be drafted for never costs another its guess.
    Nothing is done for a caller who has gone.
    """
    began = time.monotonic()
    if not task.done.set_running_or_notify_cancel():
        return 0.0
    try:
        refused = _refusals(task, check)
        ready = [index for index in range(len(task.guesses)) if index not in refused]
        drafted = None
        if ready and task.k:
            guesses, rows = [task.guesses[index] for index in ready], task.rows
            if refused:
                rows = rows.select(torch.tensor(ready, device=rows.temperature_B.device))
            drafted = propose(guesses, task.k, rows)
        absorbing = task.absorbing_seconds
        queued, worked = began - task.arrived - absorbing, absorbing + time.monotonic() - began
        task.done.set_result(ProposeAnswer(drafted, ready, refused, queued, worked))
    except Exception as error:  # the thread lives on, unless there is nothing more for it to compute on
        end_if_device_lost(error)
        task.done.set_exception(error)
    return time.monotonic() - began


def _refusals(task: ProposeTask, check: Callable[[Guess], None]) -> dict[int, RequestError]:
    refused: dict[int, RequestError] = {}
    for index, guess in enumerate(task.guesses):
        try:
            check(guess)
        except RequestError as error:
            refused[index] = error
    return refused


def draft_tokens(
    next_logits: Callable[[Tensor], Tensor],
    newest_B: Tensor,
    base_B: Tensor,
    k: int,
    rows: SamplingRows,
    candidates: int | None,
) -> Drafted:
    """k passes after the newest tokens, which stand at `base`.

    `next_logits` feeds the tokens [B] of the next position and gives the logits [B, V] of the one after it. Drawn from
    and sent are the `candidates` most probable tokens, or with None the whole vocabulary rounded to bfloat16; under the
    invariant rule nothing of a distribution is sent, and tokens are picked from all of it.
    """
    tokens_B, tokens, ids, probs = newest_B, [], [], []
    uniforms_BK = rows.uniforms(base_B, k, Purpose.DRAFT)
    all_invariant = rows.invariant is Share.ALL
    for position, uniforms_B in enumerate(uniforms_BK.unbind(1), start=1):
        position_B = base_B + position
        probs_BV = probabilities(next_logits(tokens_B)[:, None], rows)[:, 0]
        if all_invariant:
            tokens_B = pick(probs_BV, rows, position_B)
        else:
            ids_BM, probs_BM = (None, probs_BV.bfloat16()) if candidates is None else top_m(probs_BV, candidates)
            drawn_B = draw(probs_BM, uniforms_B)
            drawn_B = drawn_B if ids_BM is None else ids_BM.gather(1, drawn_B[:, None])[:, 0]
            tokens_B = with_invariant(drawn_B, probs_BV, rows, position_B)
            probs.append(probs_BM)
            ids += [] if ids_BM is None else [ids_BM]
        tokens.append(tokens_B)
    return Drafted(
        torch.stack(tokens, 1), torch.stack(ids, 1) if ids else None, torch.stack(probs, 1) if probs else None
    )
