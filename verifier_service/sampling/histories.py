"""Adjustments of logits before temperature, and the token histories that they depend on.

Shapes: B sequences, A of them adjusted, R histories, T positions, K = T - 1 draft tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from spire.errors import InvalidRequest
from spire.rpc.limits import MAX_ALLOWED_TOKENS, MAX_END_TOKENS, MAX_LOGIT_BIASES
from spire.v1 import verifier_pb2 as pb

_MOST = {"logit_bias": MAX_LOGIT_BIASES, "allowed_tokens": MAX_ALLOWED_TOKENS, "end_tokens": MAX_END_TOKENS}


@dataclass(frozen=True)
class _Rows:
    bias_RV: Tensor
    # The number of occurrences of each token in the output; True if the token occurs in prompt or output.
    counts_RV: Tensor
    seen_RV: Tensor
    ends_RV: Tensor
    # (presence, frequency, repetition) penalties, and the first position at which an end token is allowed.
    penalties_R3: Tensor
    may_end_R: Tensor

    @classmethod
    def empty(cls, R: int, V: int, device: torch.device) -> _Rows:
        def table(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
            return torch.empty(R, *shape, dtype=dtype, device=device)

        flag, number = torch.bool, torch.int64
        return cls(table(V), table(V), table(V, dtype=flag), table(V, dtype=flag), table(3), table(dtype=number))


class Histories:
    """Bias, bans and token counts of the sequences with adjusted logits, in one row per sequence."""

    def __init__(self, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self._rows = _Rows.empty(0, vocab_size, device)
        # The row of each slot.
        self.rows: dict[int, int] = {}
        self._free: list[int] = []

    def assign(self, slot: int, adjustments: pb.Adjustments, tokens: Rows[int], prompt_tokens: int) -> None:
        if not self._free:
            self._grow()
        row = self.rows[slot] = self._free.pop()
        bias_V = self._rows.bias_RV[row].fill_(-torch.inf if adjustments.allowed_tokens else 0.0)
        bias_V[list(adjustments.allowed_tokens)] = 0.0
        bias_V[list(adjustments.logit_bias)] += torch.tensor([*adjustments.logit_bias.values()], device=self.device)
        self._rows.seen_RV[row] = False
        self._rows.seen_RV[row, list(tokens)] = True
        self._rows.ends_RV[row] = False
        self._rows.ends_RV[row, list(adjustments.end_tokens)] = True
        self._rows.counts_RV[row] = torch.bincount(
            torch.tensor(list(tokens[prompt_tokens:]), dtype=torch.int64), minlength=self.vocab_size
        ).to(self._rows.counts_RV)
        penalties = (adjustments.presence_penalty, adjustments.frequency_penalty, adjustments.repetition_penalty or 1)
        self._rows.penalties_R3[row] = torch.tensor(penalties)
        self._rows.may_end_R[row] = prompt_tokens + adjustments.min_tokens

    def release(self, slot: int) -> None:
        if (row := self.rows.pop(slot, None)) is not None:
            self._free.append(row)

    def advance(self, slots: Rows[int], tokens: Rows[Rows[int]]) -> None:
        """Add the new tokens of the sequences in these slots to the token counts."""
        gained = [(self.rows[s], t) for s, of_s in zip(slots, tokens, strict=True) if s in self.rows for t in of_s]
        if gained:
            at = torch.tensor(gained, device=self.device).unbind(1)
            self._rows.counts_RV.index_put_(at, torch.ones(len(gained), device=self.device), accumulate=True)
            self._rows.seen_RV[at] = True

    def adjust(self, slots: Rows[int], logits_BTV: Tensor, draft_BK: Tensor, base_B: Tensor) -> bool:
        """Adjust logits in place. Return False if none of these sequences has adjustments."""
        index = [index for index, slot in enumerate(slots) if slot in self.rows]
        if not index:
            return False
        index_A = torch.tensor(index, device=self.device)
        row_A = torch.tensor([self.rows[slots[i]] for i in index], device=self.device)
        logits_ATV = logits_BTV[index_A] + self._rows.bias_RV[row_A][:, None]
        logits_ATV = self._penalise(logits_ATV, row_A, draft_BK[index_A])
        position_AT = base_B[index_A][:, None] + 1 + torch.arange(logits_ATV.shape[1], device=self.device)
        too_early_AT = position_AT < self._rows.may_end_R[row_A][:, None]
        logits_ATV.masked_fill_(too_early_AT[..., None] & self._rows.ends_RV[row_A][:, None], -torch.inf)
        logits_BTV[index_A] = logits_ATV
        return True

    def _penalise(self, logits_ATV: Tensor, row_A: Tensor, draft_AK: Tensor) -> Tensor:
        """Apply the penalties for the history, which includes the draft tokens before each position."""
        (T, K), penalties_A3 = (logits_ATV.shape[1], draft_AK.shape[1]), self._rows.penalties_R3[row_A]
        counts_AV, seen_AV = self._rows.counts_RV[row_A], self._rows.seen_RV[row_A]
        penalised_ATV = _penalised(logits_ATV, seen_AV[:, None], counts_AV[:, None], penalties_A3)
        if K == 0:
            return penalised_ATV
        earlier_TK = torch.arange(K, device=self.device) < torch.arange(T, device=self.device)[:, None]
        same_AKK = draft_AK[:, :, None] == draft_AK[:, None, :]
        drafted_ATK = torch.einsum("tk,akj->atj", earlier_TK.float(), same_AKK.float())
        counts_ATK = counts_AV.gather(1, draft_AK)[:, None] + drafted_ATK
        seen_ATK = seen_AV.gather(1, draft_AK)[:, None] | (drafted_ATK > 0)
        draft_ATK = draft_AK[:, None].expand(-1, T, -1)
        again_ATK = _penalised(logits_ATV.gather(2, draft_ATK), seen_ATK, counts_ATK, penalties_A3)
        return penalised_ATV.scatter_(2, draft_ATK, again_ATK)

    def _grow(self) -> None:
        old, held = self._rows, len(self._rows.may_end_R)
        new = _Rows.empty(max(4, held), self.vocab_size, self.device)
        self._rows = _Rows(*(torch.cat((getattr(old, f.name), getattr(new, f.name))) for f in fields(_Rows)))
        self._free += range(held, len(self._rows.may_end_R))


def _penalised(logits: Tensor, seen: Tensor, counts: Tensor, penalties_A3: Tensor) -> Tensor:
    """Return logits [A, T, any] after repetition, then presence and frequency penalties, as in other servers."""
    presence_A11, frequency_A11, repetition_A11 = penalties_A3[:, :, None, None].unbind(1)
    repeated = torch.where(logits > 0, logits / repetition_A11, logits * repetition_A11)
    return torch.where(seen, repeated, logits) - presence_A11 * (counts > 0) - frequency_A11 * counts


def check_adjustments(adjustments: pb.Adjustments, vocab_size: int) -> None:
    """Raise InvalidRequest, naming the field, if an adjustment is invalid."""
    for name, most in _MOST.items():
        if (count := len(getattr(adjustments, name))) > most:
            raise InvalidRequest(f"{name} has {count} entries, at most {most} are taken", name)
        for token in getattr(adjustments, name):
            if token >= vocab_size:
                raise InvalidRequest(f"{name} has token {token}; ids end at {vocab_size - 1}", name)
    for token, bias in adjustments.logit_bias.items():
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token} is {bias}: it must be finite", "logit_bias")
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(adjustments, name)
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}: it must be finite", name)
    if adjustments.repetition_penalty < 0:
        message = f"repetition_penalty is {adjustments.repetition_penalty}: it must be above 0, or 0 for none"
        raise InvalidRequest(message, "repetition_penalty")
