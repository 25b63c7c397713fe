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
    """A drafting round over B sequences. `hidden_BD`: the final hidden states of the last pass, which it unembedded."""

    hidden_BD: Tensor

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Feed the next token of every sequence and return the logits [B, V] of the token after it."""


class Stopping(NamedTuple):
    """When a round stops drafting for a sequence: once its block stands with a probability below `least_B`.

    `head` maps hidden states [B, D] and what `told_of` tells of the tokens drawn from them to the logit [B] of the
    probability that the target accepts these tokens if it accepts those before them (SpecDec++, section 3.2).
    """

    head: Callable[[Tensor, Tensor], Tensor]
    least_B: Tensor


class RoundInputs(NamedTuple):
    """The inputs of a round: the newest tokens, their positions, k, sampling parameters, and the number of
    candidates that each token is drawn from, None for the whole vocabulary of the draft.

    `vocabulary_W`: the tokens that the draft can propose; None: all. `stop`: None drafts k tokens for everybody.
    """

    newest_B: Tensor
    base_B: Tensor
    k: int
    rows: SamplingRows
    candidates: int | None
    vocabulary_W: Tensor | None = None
    stop: Stopping | None = None


@dataclass(slots=True)
class DraftItem:
    """One sequence of a batch to draft for. `newest_token` is at position `base`.

    `least_standing`: when drafting stops (`Stopping`); 0 for never.
    """

    sequence_id: str
    base: int
    newest_token: int
    least_standing: float = 0.0


@dataclass(frozen=True)
class Drafted:
    """The result of drafting: k tokens per sequence, [B, k], and the distributions q they were drawn from, [B, k, m].
    Fewer than k, if every sequence stopped before.

    The distributions cover the tokens `ids_BKM` or, if None, `vocabulary_M` or, if None, the whole vocabulary. Where no
    sequence's rule needs q, there are none, or they mean nothing.
    """

    tokens_BK: Tensor
    ids_BKM: Tensor | None
    probs_BKM: Tensor | None
    # The slice of the q ring that contains `probs_BKM`, if it was written to the ring.
    place: RingSlice | None = None
    vocabulary_M: Tensor | None = None
    # How many of its k tokens each sequence got before it stopped, [B]; None: all. The others mean nothing.
    counts_B: Tensor | None = None


def told_of(logits_RW: Tensor, drawn_R: Tensor, temperature_R: Tensor) -> Tensor:
    """Return what a stop head is told of tokens [R, 5]: at temperature 1 log q of the token, the entropy of q and log q
    of the two most probable tokens, and the temperature at which the tokens were drawn. `drawn_R`: their places in the
    logits."""
    log_q_RW = logits_RW.float().log_softmax(dim=-1)
    entropy_R = torch.special.entr(log_q_RW.exp()).sum(dim=-1)
    log_q_R = log_q_RW.gather(-1, drawn_R[..., None])[..., 0]
    best_R, second_R = log_q_RW.topk(2, dim=-1).values.unbind(dim=-1)
    return torch.stack((log_q_R, entropy_R, best_R, second_R, temperature_R.float()), dim=-1)


def draft_tokens(round_: DraftingRound, inputs: RoundInputs) -> Drafted:
    """Draft k tokens per sequence in k passes, of which the first feeds the newest tokens, at positions `base_B`.

    Each token is drawn from the most probable tokens, as many as `candidates`, or from the whole vocabulary of the
    draft in bfloat16: `vocabulary_W`, outside of which the logits are -inf, or all tokens. This distribution is
    returned as q. Under the invariant rule, tokens are picked from the whole distribution. If all sequences use the
    invariant rule, no q is returned. Where a sequence stops depends on tokens that are drafted, its own and those of
    others, and on nothing behind them, so every rule stays exact.
    """
    newest_B, base_B, k, rows, candidates, vocabulary_W, stop = inputs
    tokens_B, tokens, ids, probs = newest_B, [], [], []
    uniforms_BK = rows.uniforms(base_B, k, Purpose.DRAFT)
    all_invariant = rows.mix.invariant is Share.ALL
    if stop:
        goes_on_B = torch.ones_like(newest_B, dtype=torch.bool)
        stands_B, counts_B = torch.ones_like(newest_B, dtype=torch.float32), torch.zeros_like(newest_B)
    for position, uniforms_B in enumerate(uniforms_BK.unbind(1), start=1):
        if stop and position > 1:
            goes_on_B = goes_on_B & (stands_B >= stop.least_B)
            if goes_on_B.device.type == "cpu" and not goes_on_B.any():  # elsewhere, asking would wait for the device
                break
        position_B = base_B + position
        logits_BV = round_.next_logits(tokens_B)
        before_BV = logits_BV.clone() if stop else logits_BV
        probs_BV = probabilities(logits_BV[:, None], rows)[:, 0]
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
        if stop:
            counts_B += goes_on_B
            told_BF = told_of(before_BV, tokens_B, rows.temperature_B)
            stands_B *= stop.head(round_.hidden_BD, told_BF).sigmoid().float()
    return Drafted(
        torch.stack(tokens, 1),
        torch.stack(ids, 1) if ids else None,
        torch.stack(probs, 1) if probs else None,
        vocabulary_M=vocabulary_W if candidates is None else None,
        counts_B=counts_B if stop else None,
    )
