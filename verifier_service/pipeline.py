"""The sampling pipeline by slot: what each sequence asked for, what it has written, and so its p and its logprobs.

Logits are adjusted (bias, penalties, masks, grammar) with the history that each position would have if the draft tokens
before it stood; then comes `spire.sampling`. State changes in three places: `assign`, `advance`, `release`.

Shapes: B sequences, A of them adjusted, T positions, K = T - 1 draft tokens, V vocabulary, n tokens of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from spire.errors import InvalidRequest
from spire.rpc.sampling import from_protos
from spire.rpc.tensors import to_wire
from spire.sampling import SamplingRows, probabilities
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb
from verifier_service.grammar import Grammars, Matcher

MAX_LOGPROBS = 20
_STUCK = "no token is possible here: allowed tokens, min_tokens and grammar exclude each other, or numbers overflow"


@dataclass(frozen=True)
class Distributions:
    """p and the adjusted logits [B, T, V]; `possible_BT` is false where adjustments left no token, or no number.

    `problems`: rows whose grammar cannot be followed any more.
    """

    p_BTV: Tensor
    logits_BTV: Tensor
    possible_BT: Tensor
    problems: dict[int, InvalidRequest]

    def refusals(self, accepted_B: Tensor) -> list[InvalidRequest | None]:
        """Per row why it cannot go on, of its positions up to that of the first token that was not guessed."""
        position_T = torch.arange(self.possible_BT.shape[1], device=accepted_B.device)
        stuck = (~self.possible_BT & (position_T <= accepted_B[:, None])).any(dim=1).tolist()
        return [self.problems.get(row) or (InvalidRequest(_STUCK) if none else None) for row, none in enumerate(stuck)]


class Pipeline:
    """Sampling parameters, histories and grammars by slot. Parameters are tensors: a round selects its rows."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, grammars: Grammars | None = None):
        self._rows = from_protos([tensor_pb2.Sampling(top_p=1)] * slots, device)
        self._histories = Histories(vocab_size, device)
        self._grammars, self._matchers = grammars, dict[int, Matcher]()
        # Why a grammar that was followed cannot be followed any more.
        self._problems: dict[int, InvalidRequest] = {}
        # How many alternatives are reported beside each token.
        self._logprobs: dict[int, int] = {}

    def assign(self, slot: int, start: pb.Start, matcher: Matcher | None) -> None:
        """A sequence begins in this slot. What it wrote in an earlier life is part of its history."""
        new = from_protos([start.sampling])
        for parameter in fields(SamplingRows):
            getattr(self._rows, parameter.name)[slot] = getattr(new, parameter.name)[0]
        prompt_tokens = start.prompt_tokens or len(start.tokens)
        # A grammar alone needs no history.
        if any(wish.name != "grammar" for wish, _ in start.adjustments.ListFields()):
            self._histories.assign(slot, start.adjustments, start.tokens, prompt_tokens)
        if matcher is not None:
            self._matchers[slot] = matcher
            self._follow(slot, start.tokens[prompt_tokens:])
        if start.HasField("logprobs"):
            self._logprobs[slot] = start.logprobs

    def release(self, slot: int) -> None:
        self._histories.release(slot)
        self._matchers.pop(slot, None)
        self._problems.pop(slot, None)
        self._logprobs.pop(slot, None)

    def advance(self, slots: Rows[int], tokens: Rows[Rows[int]]) -> None:
        """These sequences have gained these tokens."""
        self._histories.advance(slots, tokens)
        for slot, gained in zip(slots, tokens, strict=True):
            if slot in self._matchers:
                self._follow(slot, gained)

    def _follow(self, slot: int, tokens: Rows[int]) -> None:
        try:
            self._matchers[slot].advance(tokens)
        except InvalidRequest as error:
            self._problems[slot] = error

    def of(self, slots: Rows[int]) -> SamplingRows:
        return self._rows.select(torch.tensor(slots, device=self._rows.seed_B.device))

    def distributions(
        self,
        slots: Rows[int],
        rows: SamplingRows,
        logits_BTV: Tensor,
        draft_BK: Tensor,
        counts: Rows[int],
        base_B: Tensor,
    ) -> Distributions:
        """What the tokens behind `base` are drawn from. Takes over `logits_BTV` and changes it in place."""
        adjusted = self._histories.adjust(slots, logits_BTV, draft_BK, base_B)
        masked, problems = self._mask(slots, logits_BTV, draft_BK, counts)
        possible_BT = torch.ones(logits_BTV.shape[:2], dtype=torch.bool, device=logits_BTV.device)
        if adjusted or masked:
            possible_BT = logits_BTV.amax(dim=-1).isfinite()
            logits_BTV.masked_fill_(~possible_BT[..., None], 0.0)
        return Distributions(probabilities(logits_BTV, rows), logits_BTV, possible_BT, problems)

    def _mask(
        self, slots: Rows[int], logits_BTV: Tensor, draft_BK: Tensor, counts: Rows[int]
    ) -> tuple[bool, dict[int, InvalidRequest]]:
        """Leave what grammars allow, in place. Whether there are any, and the rows whose grammar has failed."""
        problems = {row: self._problems[slot] for row, slot in enumerate(slots) if slot in self._problems}
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers and row not in problems]
        if not rows or self._grammars is None:
            return False, problems
        drafts = [draft_BK[row, : counts[row]].tolist() for row in rows]
        matchers = [self._matchers[slots[row]] for row in rows]
        for row, mask in zip(rows, self._grammars.masks(list(zip(matchers, drafts, strict=True))), strict=True):
            if isinstance(mask, InvalidRequest):
                problems[row] = mask
            else:
                logits_BTV[row, : len(mask)].masked_fill_(~mask.to(logits_BTV.device), -torch.inf)
        return True, problems

    def logprobs(
        self, slots: Rows[int], rows: SamplingRows, distributions: Distributions, tokens: Rows[Rows[int]]
    ) -> list[pb.Logprobs | None]:
        """Per row those of the tokens it gained, if it asked for them."""
        asked = [row for row, slot in enumerate(slots) if slot in self._logprobs]
        found: list[pb.Logprobs | None] = [None] * len(slots)
        if asked:
            index = torch.tensor(asked, device=distributions.p_BTV.device)
            log_p_ATV = _log_p(distributions.p_BTV[index], distributions.logits_BTV[index], rows.select(index))
            for log_p_TV, row in zip(log_p_ATV, asked, strict=True):
                found[row] = scores_of(log_p_TV, tokens[row], self._logprobs[slots[row]]).to_proto()
        return found

    def score(self, slot: int, logits_TV: Tensor, tokens: Rows[int]) -> Scores:
        """Logprobs of a prompt's tokens, by the logits at the positions before them. Adjustments are for the output."""
        rows = self.of([slot])
        p_BTV = probabilities(logits_TV[None], rows)
        return scores_of(_log_p(p_BTV, logits_TV[None], rows)[0], tokens, self._logprobs.get(slot, 0))


def _log_p(p_BTV: Tensor, logits_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Logarithms of p, also where p is too small for a float; of a greedy sequence those at temperature 1."""
    temperature_B = torch.where(rows.greedy_B, 1.0, rows.temperature_B)
    scaled_BTV = (logits_BTV - logits_BTV.amax(dim=-1, keepdim=True)) / temperature_B[:, None, None]
    excluded_BTV = (p_BTV == 0) & rows.truncated_B[:, None, None]
    return scaled_BTV.masked_fill_(excluded_BTV, -torch.inf).log_softmax(dim=-1)


# -- logprobs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Logprobs of n tokens [n], and of the m most probable ones at each position: ids and logprobs [n, m]."""

    tokens_n: Tensor
    top_ids_nm: Tensor
    top_nm: Tensor

    def to_proto(self) -> pb.Logprobs:
        return pb.Logprobs(
            tokens=to_wire(self.tokens_n), top_ids=to_wire(self.top_ids_nm.int()), top=to_wire(self.top_nm)
        )

    @classmethod
    def join(cls, parts: Rows[Scores]) -> Scores:
        return cls(*(torch.cat([getattr(part, part_field.name) for part in parts]) for part_field in fields(cls)))


def scores_of(log_p_TV: Tensor, tokens: Rows[int], alternatives: int) -> Scores:
    """Of tokens at the first n of T positions."""
    log_p_nV = log_p_TV[: len(tokens)]
    of_tokens_n = log_p_nV.gather(1, torch.tensor(tokens, device=log_p_TV.device)[:, None])[:, 0]
    top_nm, ids_nm = log_p_nV.topk(min(alternatives, log_p_nV.shape[-1]), dim=-1)
    return Scores(of_tokens_n.cpu(), ids_nm.cpu(), top_nm.cpu())


# -- adjustments -----------------------------------------------------------------------------------------------------


@dataclass
class Histories:
    """Bias, bans and token counts of the sequences that are adjusted: one row each, in tensors that grow as needed."""

    vocab_size: int
    device: torch.device
    _row: dict[int, int] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        R, V = 0, self.vocab_size
        self._bias_RV = torch.empty(R, V, device=self.device)
        # How often a token occurs in the output, and whether it occurs at all, prompt included.
        self._counts_RV = torch.empty(R, V, device=self.device)
        self._seen_RV = torch.empty(R, V, dtype=torch.bool, device=self.device)
        self._ends_RV = torch.empty(R, V, dtype=torch.bool, device=self.device)
        # (presence, frequency, repetition), and the first position where an end token may stand.
        self._penalties_R3 = torch.empty(R, 3, device=self.device)
        self._may_end_R = torch.empty(R, dtype=torch.int64, device=self.device)

    def assign(self, slot: int, adjustments: pb.Adjustments, tokens: Rows[int], prompt_tokens: int) -> None:
        if not self._free:
            self._grow()
        row = self._row[slot] = self._free.pop()
        bias_V = self._bias_RV[row].fill_(-torch.inf if adjustments.allowed_tokens else 0.0)
        bias_V[list(adjustments.allowed_tokens)] = 0.0
        bias_V[list(adjustments.logit_bias)] += torch.tensor([*adjustments.logit_bias.values()], device=self.device)
        self._seen_RV[row] = False
        self._seen_RV[row, list(tokens)] = True
        self._ends_RV[row] = False
        self._ends_RV[row, list(adjustments.end_tokens)] = True
        self._counts_RV[row] = torch.bincount(
            torch.tensor(list(tokens[prompt_tokens:]), dtype=torch.int64), minlength=self.vocab_size
        ).to(self._counts_RV)
        penalties = (adjustments.presence_penalty, adjustments.frequency_penalty, adjustments.repetition_penalty or 1)
        self._penalties_R3[row] = torch.tensor(penalties)
        self._may_end_R[row] = prompt_tokens + adjustments.min_tokens

    def release(self, slot: int) -> None:
        if (row := self._row.pop(slot, None)) is not None:
            self._free.append(row)

    def advance(self, slots: Rows[int], tokens: Rows[Rows[int]]) -> None:
        """Count what these sequences have gained."""
        gained = [(self._row[s], t) for s, of_s in zip(slots, tokens, strict=True) if s in self._row for t in of_s]
        if gained:
            at = torch.tensor(gained, device=self.device).unbind(1)
            self._counts_RV.index_put_(at, torch.ones(len(gained), device=self.device), accumulate=True)
            self._seen_RV[at] = True

    def adjust(self, slots: Rows[int], logits_BTV: Tensor, draft_BK: Tensor, base_B: Tensor) -> bool:
        """Adjust logits in place, where any of these sequences asks for it."""
        index = [index for index, slot in enumerate(slots) if slot in self._row]
        if not index:
            return False
        index_A = torch.tensor(index, device=self.device)
        row_A = torch.tensor([self._row[slots[i]] for i in index], device=self.device)
        logits_ATV = logits_BTV[index_A] + self._bias_RV[row_A][:, None]
        logits_ATV = self._penalise(logits_ATV, row_A, draft_BK[index_A])
        position_AT = base_B[index_A][:, None] + 1 + torch.arange(logits_ATV.shape[1], device=self.device)
        too_early_AT = position_AT < self._may_end_R[row_A][:, None]
        logits_ATV.masked_fill_(too_early_AT[..., None] & self._ends_RV[row_A][:, None], -torch.inf)
        logits_BTV[index_A] = logits_ATV
        return True

    def _penalise(self, logits_ATV: Tensor, row_A: Tensor, draft_AK: Tensor) -> Tensor:
        """Penalties of the output so far, then again of the draft tokens, with those before each position counted."""
        (T, K), penalties_A3 = (logits_ATV.shape[1], draft_AK.shape[1]), self._penalties_R3[row_A]
        counts_AV, seen_AV = self._counts_RV[row_A], self._seen_RV[row_A]
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
        rows, more = len(self._may_end_R), max(4, len(self._may_end_R))
        for name in ("_bias_RV", "_counts_RV", "_seen_RV", "_ends_RV", "_penalties_R3", "_may_end_R"):
            held = getattr(self, name)
            setattr(self, name, torch.cat((held, held.new_empty(more, *held.shape[1:]))))
        self._free += range(rows, rows + more)


def _penalised(logits: Tensor, seen: Tensor, counts: Tensor, penalties_A3: Tensor) -> Tensor:
    """Repetition, then presence and frequency, as other servers have it. [A, T, any]"""
    presence_A11, frequency_A11, repetition_A11 = penalties_A3[:, :, None, None].unbind(1)
    repeated = torch.where(logits > 0, logits / repetition_A11, logits * repetition_A11)
    return torch.where(seen, repeated, logits) - presence_A11 * (counts > 0) - frequency_A11 * counts


def check_adjustments(adjustments: pb.Adjustments, vocab_size: int) -> None:
    """Raises InvalidRequest naming what cannot be used."""
    for name in ("logit_bias", "allowed_tokens", "end_tokens"):
        for token in getattr(adjustments, name):
            if token >= vocab_size:
                raise InvalidRequest(f"{name} has token {token}; ids end at {vocab_size - 1}")
    for token, bias in adjustments.logit_bias.items():
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token} is {bias}: it must be finite")
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(adjustments, name)
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}: it must be finite")
    if adjustments.repetition_penalty < 0:
        raise InvalidRequest(f"repetition_penalty is {adjustments.repetition_penalty}: it must be above 0")
