"""Drafting: the sequences to draft for, the k passes of a draft over the sequences, and the result.

Each pass feeds one token per sequence and draws the next token from the draft's distribution.

Shapes: B sequences, K passes, V vocabulary of the target, W vocabulary of the draft, M candidates kept of a
distribution.
Does not know: which model drafts, and in which process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spire.decoding.randomness import Purpose
from spire.decoding.sampling import SamplingRows, Share, draw, pick, probabilities, top_m, with_invariant
from spire.v1.verifier_pb2 import RingSlice

# The largest k of any draft in this project.
MAX_SPECULATION_DEPTH = 16


class DraftingRound(Protocol):
    """A drafting round over B sequences."""

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Feed the next token of every sequence and return the logits [B, V] of the token after it."""


class RoundInputs(NamedTuple):
    """The inputs of a round: the newest tokens, their positions, k, sampling parameters, and the number of
    candidates that each token is drawn from, None for the whole vocabulary of the draft. As `draft_tokens` takes them.

    `vocabulary_W`: the tokens that the draft can propose; None: all.
    """

    newest_B: Tensor
    base_B: Tensor
    k: int
    rows: SamplingRows
    candidates: int | None
    vocabulary_W: Tensor | None = None


@dataclass(slots=True)
class DraftItem:
    """One sequence of a batch to draft for. `newest_token` is at position `base`."""

    sequence_id: str
    base: int
    newest_token: int


@dataclass(frozen=True)
class Drafted:
    """The result of drafting: k tokens per sequence, [B, k], and the distributions q they were drawn from, [B, k, m].

    The distributions cover the tokens `ids_BKM` or, if None, `vocabulary_M` or, if None, the whole vocabulary. If all
    sequences use the invariant rule there are no distributions, because this rule does not use q.
    """

    tokens_BK: Tensor
    ids_BKM: Tensor | None
    probs_BKM: Tensor | None
    # The slice of the q ring that contains `probs_BKM`, if it was written to the ring.
    place: RingSlice | None = None
    vocabulary_M: Tensor | None = None


def draft_tokens(
    next_logits: Callable[[Tensor], Tensor],
    newest_B: Tensor,
    base_B: Tensor,
    k: int,
    rows: SamplingRows,
    candidates: int | None,
    vocabulary_W: Tensor | None = None,
) -> Drafted:
    """Draft k tokens per sequence in k passes, of which the first feeds the newest tokens, at positions `base_B`.

    `next_logits` feeds tokens [B] at the next position and returns the logits [B, V] of the token after it. Each token
    is drawn from the `candidates` most probable tokens or, if None, from the whole vocabulary of the draft in bfloat16:
    `vocabulary_W`, outside of which the logits are -inf, or all tokens. This distribution is returned as q. Under the
    invariant rule, tokens are picked from the whole distribution. If all sequences use the invariant rule, no q is
    returned.
    """
    tokens_B, tokens, ids, probs = newest_B, [], [], []
    uniforms_BK = rows.uniforms(base_B, k, Purpose.DRAFT)
    all_invariant = rows.mix.invariant is Share.ALL
    for position, uniforms_B in enumerate(uniforms_BK.unbind(1), start=1):
        position_B = base_B + position
        probs_BV = probabilities(next_logits(tokens_B)[:, None], rows)[:, 0]
        if all_invariant:
            tokens_B = pick(probs_BV, rows, position_B)
        else:
            if candidates is not None:
                ids_BM, probs_BM = top_m(probs_BV, candidates)
                drawn_B = ids_BM.gather(1, draw(probs_BM, uniforms_B)[:, None])[:, 0]
                ids.append(ids_BM)
            elif vocabulary_W is not None:
                probs_BM = probs_BV[:, vocabulary_W].bfloat16()
                drawn_B = vocabulary_W[draw(probs_BM, uniforms_B)]
            else:
                probs_BM = probs_BV.bfloat16()
                drawn_B = draw(probs_BM, uniforms_B)
            tokens_B = with_invariant(drawn_B, probs_BV, rows, position_B)
            probs.append(probs_BM)
        tokens.append(tokens_B)
    return Drafted(
        torch.stack(tokens, 1),
        torch.stack(ids, 1) if ids else None,
        torch.stack(probs, 1) if probs else None,
        vocabulary_M=vocabulary_W if candidates is None else None,
    )
