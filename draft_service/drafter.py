"""The drafter: absorbs activations of verified positions, proposes tokens. Everything here runs on one thread.

It is a deterministic function of the verifier's stream and of the requests: what is lost with the process comes again
by replay. Per-sequence work is bookkeeping of integers; every tensor operation covers the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spire.drafting import Drafted, Guess, draft_tokens
from spire.errors import StaleBlock, UnknownSequence
from spire.model.draft import SpireDraft
from spire.model.draft_memory import DraftMemory
from spire.sampling import SamplingRows


@dataclass(frozen=True)
class Span:
    """Consecutive verified positions of one sequence, `rows` long, as they lie in a message's tensor."""

    sequence_id: str
    start: int
    count: int
    reset: bool


class Drafter:
    """Slots of constant-size memory by sequence id, and the rounds drafted from them."""

    def __init__(self, draft: SpireDraft, max_sequences: int, top_m: int):
        self.draft = draft
        self.memory = DraftMemory(draft, max_sequences)
        self.device = self.memory.positions_XS.device
        self.top_m = top_m if top_m < draft.config.vocab_size else None
        self.slots: dict[str, int] = {}
        self.absorbed: dict[str, int] = {}
        self._free = list(range(max_sequences))[::-1]

    # --- what the verifier says ---------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """A new subscription begins: whatever is still alive will be replayed."""
        self.end(list(self.slots))

    def end(self, sequence_ids: list[str]) -> None:
        for sequence_id in sequence_ids:
            if (slot := self.slots.pop(sequence_id, None)) is not None:
                self._free.append(slot)
                del self.absorbed[sequence_id]

    def absorb(self, spans: list[Span], rows_RND: Tensor) -> list[str]:
        """Take a message's rows into memory. Returns the sequences that have a gap and need a replay."""
        slots = [self._slot_for(span) for span in spans]
        counts_S = torch.tensor([span.count for span in spans])
        slots_R = torch.tensor([-1 if slot is None else slot for slot in slots]).repeat_interleave(counts_S)
        positions_R = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        ends_R = torch.tensor([span.start + span.count for span in spans]).repeat_interleave(counts_S)
        spire = self.draft.draft
        keep_R = (slots_R >= 0) & ((positions_R < spire.sink) | (positions_R >= ends_R - spire.window))
        kept = (slots_R[keep_R], positions_R[keep_R], rows_RND[keep_R])
        self.memory.absorb(*(tensor.to(self.device) for tensor in kept))
        return [
            s.sequence_id for s, slot in zip(spans, slots, strict=True) if slot is None and s.sequence_id in self.slots
        ]

    def _slot_for(self, span: Span) -> int | None:
        """The slot that a span's rows belong in; None when they cannot be used."""
        held = self.absorbed.get(span.sequence_id)
        if span.reset:
            if held is None:
                if not self._free:
                    return None
                self.slots[span.sequence_id] = self._free.pop()
            self.memory.forget(torch.tensor([self.slots[span.sequence_id]], device=self.device))
        elif held is None or self.draft.draft.sink < held < span.start:
            # Only the window of a replay, which follows the sink, may begin further on.
            return None
        self.absorbed[span.sequence_id] = span.start + span.count
        return self.slots[span.sequence_id]

    # --- what the gateway asks ------------------------------------------------------------------------------------

    def behind(self, guess: Guess) -> bool:
        """Whether activations up to the guess's base are still to come."""
        return self.absorbed.get(guess.sequence_id, -1) < guess.base

    def check(self, guess: Guess) -> None:
        """Raises UnknownSequence or StaleBlock when no guess can be made from what is held now."""
        absorbed = self.absorbed.get(guess.sequence_id)
        if absorbed is None:
            raise UnknownSequence(f"no activations of sequence {guess.sequence_id!r} have arrived")
        if absorbed != guess.base:
            raise StaleBlock(f"sequence {guess.sequence_id!r}: base {guess.base} asked, {absorbed} absorbed")

    def propose(self, guesses: list[Guess], k: int, rows: SamplingRows) -> Drafted:
        """Draft k tokens for each of B sequences in k fixed-shape passes."""
        slots_B = torch.tensor([self.slots[g.sequence_id] for g in guesses], device=self.device)
        base_B = torch.tensor([g.base for g in guesses], device=self.device)
        round_memory = self.memory.round(slots_B, base_B, k)
        newest_B = torch.tensor([g.newest_token for g in guesses], device=self.device)

        def next_logits(tokens_B: Tensor) -> Tensor:
            round_memory.advance()
            return self.draft.unembed(self.draft(tokens_B[:, None], round_memory))[:, 0]

        return draft_tokens(next_logits, newest_B, base_B, k, rows, self.top_m)
