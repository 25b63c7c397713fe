"""The sampling pipeline by slot: a sequence's parameters, history and grammar, and its p and logprobs.

Logits are adjusted (bias, penalties, masks, grammar) with the history that each position would have if the draft tokens
before it were accepted; `spire.decoding.sampling` does the rest. Only `assign`, `advance` and `release` change state.

Shapes: B sequences, A of them adjusted, T positions, K = T - 1 draft tokens, V vocabulary, n tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor

from spire.decoding.sampling import SamplingRows, probabilities
from spire.errors import InvalidRequest
from spire.rpc.sampling import from_protos
from spire.v1 import tensor_pb2, verifier_pb2 as pb
from verifier_service.sampling.grammar import Grammars, Matcher
from verifier_service.sampling.histories import Histories
from verifier_service.sampling.logprobs import Scores, log_p, scores_of

# The longest processor time of the model's thread for a token of each grammar of a batch.
_MOST_GRAMMAR_SECONDS = 0.01
_STUCK = "no token is possible here: allowed tokens, min_tokens and grammar exclude each other, or numbers overflow"


@dataclass(frozen=True)
class Distributions:
    """p and the adjusted logits [B, T, V]. `problems`: by row, the error if its grammar can no longer be followed.

    `possible_BT` is False where adjustments left no token or no finite logit, and None if nothing was adjusted.
    """

    p_BTV: Tensor
    logits_BTV: Tensor
    possible_BT: Tensor | None
    problems: dict[int, InvalidRequest]

    def refusals(self, accepted_B: Tensor) -> list[InvalidRequest | None]:
        """Return each row's error, or None. Positions after the accepted tokens and the next token are ignored."""
        if self.possible_BT is None:
            return [self.problems.get(row) for row in range(len(accepted_B))]
        position_T = torch.arange(self.possible_BT.shape[1], device=accepted_B.device)
        stuck = (~self.possible_BT & (position_T <= accepted_B[:, None])).any(dim=1).tolist()
        return [self.problems.get(row) or (InvalidRequest(_STUCK) if none else None) for row, none in enumerate(stuck)]


class Pipeline:
    """Sampling parameters, histories and grammars by slot. Parameters are tensors: a round selects its slots' rows."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, grammars: Grammars | None = None):
        # On the CPU: which kinds of sequences a batch has is decided there.
        self._rows, self._device = from_protos([tensor_pb2.Sampling(top_p=1)] * slots), device
        # Slots and rows of the last batch; the next batch usually has the same slots.
        self._last: tuple[Rows[int], SamplingRows] = ((), self._rows)
        self._histories = Histories(vocab_size, device)
        self._grammars, self._matchers = grammars, dict[int, Matcher]()
        # By slot, the error if its grammar can no longer be followed.
        self._problems: dict[int, InvalidRequest] = {}
        # By slot, the number of alternatives reported with each token.
        self._logprobs: dict[int, int] = {}

    def assign(self, slot: int, start: pb.Start, matcher: Matcher | None) -> None:
        """Begin a sequence in this slot. Its history includes the output tokens from before a restart."""
        new, self._last = from_protos([start.sampling]), ((), self._rows)
        for parameter in fields(SamplingRows):
            getattr(self._rows, parameter.name)[slot] = getattr(new, parameter.name)[0]
        prompt_tokens = start.prompt_tokens or len(start.tokens)
        # A sequence with only a grammar needs no history.
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
        """Append new tokens to the histories of the sequences in these slots, and advance their grammars."""
        self._histories.advance(slots, tokens)
        for slot, gained in zip(slots, tokens, strict=True):
            if slot in self._matchers:
                self._follow(slot, gained)
        self._limit_grammars(slots)

    def _limit_grammars(self, slots: Rows[int]) -> None:
        """Refuse the slowest grammars of a batch until a token of all others takes at most _MOST_GRAMMAR_SECONDS."""
        followed = [slot for slot in slots if slot in self._matchers and slot not in self._problems]
        fastest = sorted(followed, key=lambda slot: self._matchers[slot].token_seconds)
        times = accumulate(self._matchers[slot].token_seconds for slot in fastest)
        for slot, together in zip(fastest, times, strict=True):
            if together > _MOST_GRAMMAR_SECONDS:
                self._problems[slot] = self._matchers[slot].too_slow()

    def _follow(self, slot: int, tokens: Rows[int]) -> None:
        try:
            self._matchers[slot].advance(tokens)
        except InvalidRequest as error:
            self._problems[slot] = error

    def leaves_alone(self, slots: Rows[int]) -> bool:
        """True if no sequence in these slots has adjustments, a grammar or logprobs."""
        asked = (self._logprobs, self._matchers, self._problems, self._histories.rows)
        return all(of.keys().isdisjoint(slots) for of in asked)

    def of(self, slots: Rows[int]) -> SamplingRows:
        last, rows = self._last
        if list(slots) != list(last):
            rows = self._rows.select(torch.tensor(slots)).to(self._device)
            self._last = list(slots), rows
        return rows

    def distributions(
        self,
        slots: Rows[int],
        rows: SamplingRows,
        logits_BTV: Tensor,
        draft_BK: Tensor,
        counts: Rows[int],
        base_B: Tensor,
    ) -> Distributions:
        """Return the distributions of the tokens after position `base_B`. Adjusts `logits_BTV` in place."""
        adjusted = self._histories.adjust(slots, logits_BTV, draft_BK, base_B)
        masked, problems = self._mask(slots, logits_BTV, draft_BK, counts)
        possible_BT = None
        if adjusted or masked:
            possible_BT = logits_BTV.amax(dim=-1).isfinite()
            logits_BTV.masked_fill_(~possible_BT[..., None], 0.0)
        return Distributions(probabilities(logits_BTV, rows), logits_BTV, possible_BT, problems)

    def _mask(
        self, slots: Rows[int], logits_BTV: Tensor, draft_BK: Tensor, counts: Rows[int]
    ) -> tuple[bool, dict[int, InvalidRequest]]:
        """Mask tokens that grammars forbid, in place. Return True if any grammar was applied, and errors by row."""
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
        """Return for each row the logprobs of its new tokens, or None if they are not requested."""
        asked = [row for row, slot in enumerate(slots) if slot in self._logprobs]
        found: list[pb.Logprobs | None] = [None] * len(slots)
        if asked:
            index = torch.tensor(asked, device=distributions.p_BTV.device)
            log_p_ATV = log_p(distributions.p_BTV[index], distributions.logits_BTV[index], rows.select(index))
            for log_p_TV, row in zip(log_p_ATV, asked, strict=True):
                found[row] = scores_of(log_p_TV, tokens[row], self._logprobs[slots[row]]).to_proto()
        return found

    def score(self, slot: int, logits_TV: Tensor, tokens: Rows[int]) -> Scores:
        """Return the logprobs of prompt tokens from the logits that predict the tokens, without adjustments."""
        rows = self.of([slot])
        p_BTV = probabilities(logits_TV[None], rows)
        return scores_of(log_p(p_BTV, logits_TV[None], rows)[0], tokens, self._logprobs.get(slot, 0), ranked=True)
