"""The sampling pipeline: logits to probabilities to tokens, with randomness that is a function and not a stream.

Every draw takes its uniform number from a hash of (seed, choice, absolute position, purpose). So a token depends on
nothing that batching, retries or restarts could change. Draft, acceptance and sampling are different purposes:
sharing a number between them biases the output.

Shapes: B sequences, T positions, V vocabulary, M candidates. What it does not know: penalties, masks, logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

# 64-bit constants of splitmix64, as the signed bit patterns that int64 tensors carry.
_WEYL = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class Purpose(IntEnum):
    """What a random number decides. Each has numbers of its own."""

    DRAFT = 1
    ACCEPT = 2
    SAMPLE = 3


@dataclass(frozen=True)
class SamplingRows:
    """How each of B sequences is sampled: one tensor per parameter. `seed_B` holds uint64 bit patterns in int64."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    seed_B: Tensor
    choice_B: Tensor

    @property
    def greedy_B(self) -> Tensor:
        return self.temperature_B == 0

    def select(self, index: Tensor) -> SamplingRows:
        """The rows at `index`."""
        return SamplingRows(*(getattr(self, field.name)[index] for field in fields(self)))

    def uniform(self, position: Tensor, purpose: Purpose) -> Tensor:
        """Uniform numbers for absolute positions [B] or [B, T] of these sequences."""
        extra = (1,) * (position.ndim - 1)
        return uniform(self.seed_B.view(-1, *extra), self.choice_B.view(-1, *extra), position, purpose)


def uniform(seed: Tensor, choice: Tensor, position: Tensor, purpose: Purpose) -> Tensor:
    """A float64 number in [0, 1) for each (seed, choice, position), all int64 tensors that broadcast."""
    hashed = _mix(seed + _WEYL)
    hashed = _mix(hashed + (choice * len(Purpose) + int(purpose)) * _WEYL)
    hashed = _mix(hashed + (position + 1) * _WEYL)
    return _shift_right(hashed, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every bit of the input flips each output bit with probability 1/2."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: the sign bit of int64 is not copied down."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def probabilities(logits_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution each token is really drawn from: temperature, then top_k, then top_p, renormalised each time.

    Greedy rows are one-hot at the argmax, so that one rule serves every temperature.
    """
    if bool(rows.greedy_B.all()):
        return _one_hot(logits_BTV)
    # The maximum is subtracted first: a tiny temperature then gives -inf and never inf - inf.
    shifted = logits_BTV - logits_BTV.amax(dim=-1, keepdim=True)
    temperature_B = torch.where(rows.greedy_B, 1.0, rows.temperature_B)
    probs_BTV = (shifted / temperature_B[:, None, None]).softmax(dim=-1)
    truncated_B = ((rows.top_k_B > 0) | (rows.top_p_B < 1)) & ~rows.greedy_B
    for row_B, change in ((truncated_B, _truncate), (rows.greedy_B, lambda probs, _: _one_hot(probs))):
        if bool(row_B.any()):
            index = row_B.nonzero().squeeze(1)
            probs_BTV[index] = change(probs_BTV[index], rows.select(index))
    return probs_BTV


def _one_hot(scores_BTV: Tensor) -> Tensor:
    return torch.zeros_like(scores_BTV).scatter_(-1, scores_BTV.argmax(dim=-1, keepdim=True), 1.0)


def _truncate(probs_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Keep the top_k most probable tokens, then the fewest of those whose sum reaches top_p: always at least one."""
    sorted_BTV, order_BTV = probs_BTV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_BTV.shape[-1], device=probs_BTV.device)
    top_k_B = torch.where(rows.top_k_B > 0, rows.top_k_B, len(rank_V))
    sorted_BTV = sorted_BTV * (rank_V < top_k_B[:, None, None])
    sorted_BTV = sorted_BTV / sorted_BTV.sum(dim=-1, keepdim=True)
    before_BTV = sorted_BTV.cumsum(dim=-1) - sorted_BTV
    kept_BTV = (before_BTV < rows.top_p_B[:, None, None]) | (rank_V == 0)
    sorted_BTV = sorted_BTV * torch.where(rows.top_p_B[:, None, None] < 1, kept_BTV, True)
    sorted_BTV = sorted_BTV / sorted_BTV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs_BTV).scatter_(-1, order_BTV, sorted_BTV)


def draw(probs_V: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids from distributions [..., V] and uniform numbers [...]: inverse CDF, int64.

    The numbers scale with the row's sum, so rows need not be normalised. A token of probability zero never comes out.
    """
    cumulative_V = probs_V.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative_V[..., -1:]
    # Rounding must not lift a threshold to the very end, behind which there is no token.
    threshold = torch.minimum(uniforms[..., None] * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative_V, threshold, right=True).clamp_(max=probs_V.shape[-1] - 1)
    if probs_V.device.type == "cpu":
        return ids.squeeze(-1)  # one sum after the other: the first one above the threshold is of a token that adds
    likeliest = probs_V.argmax(dim=-1, keepdim=True)
    return torch.where(probs_V.gather(-1, ids) > 0, ids, likeliest).squeeze(-1)


def top_m(probs_BV: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m most probable tokens and their renormalised probabilities: what a draft samples from and sends as q."""
    probs_BM, ids_BM = probs_BV.topk(min(m, probs_BV.shape[-1]), dim=-1)
    return ids_BM, probs_BM / probs_BM.sum(dim=-1, keepdim=True)
