"""The drafter: absorbs what was verified, proposes tokens. Everything here runs on one thread.

It is a deterministic function of the verifier's stream and of the requests: what is lost with the process comes again
by replay. Per-sequence work is bookkeeping of integers; every tensor operation covers the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from torch import Tensor

from spire.drafting import MAX_SPECULATION_DEPTH, Drafted, Guess, draft_tokens
from spire.errors import StaleBlock, UnknownSequence
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory
from spire.model.fused_draft import FusedRound
from spire.model.token_memory import TokenMemory
from spire.randomness import Purpose
from spire.rpc.carrier import OverwritingRing
from spire.rpc.sampling import ONE_OF_EACH, from_protos
from spire.sampling import SamplingRows

# More than can end while a round of theirs is under way.
_ENDED_KEPT = 4096

_WARMING_DEPTH = 2

log = structlog.get_logger("draft_service")


@dataclass(slots=True)
class Span:
    """Consecutive verified positions of one sequence, `rows` long, as they lie in a message's tensor."""

    sequence_id: str
    start: int
    count: int
    reset: bool


@dataclass(frozen=True)
class Verified:
    """What a message of the verifier says of R positions: activations of the tapped layers, and tokens if asked for."""

    spans: list[Span]
    rows_RND: Tensor
    tokens: list[int]


def held_positions(draft: Draft, max_context: int) -> int:
    """How many positions of a sequence a draft keeps keys and values of at most."""
    spire = draft.draft
    return spire.sink + spire.window if spire.tapped_layers else max_context + MAX_SPECULATION_DEPTH


class Drafter:
    """Slots of memory by sequence id, and the rounds drafted from them. `max_context` is the longest sequence."""

    def __init__(self, draft: Draft, max_sequences: int, top_m: int, max_context: int):
        self.draft = draft
        self.memory: DraftMemory | TokenMemory = (
            DraftMemory(draft, max_sequences)
            if draft.draft.tapped_layers
            else TokenMemory(draft, max_sequences, max_context)
        )
        self.device, self.dtype = draft.embed_tokens.weight.device, draft.embed_tokens.weight.dtype
        # Where the verifier reads q from, if that is on this host.
        self.q_ring: Callable[[], OverwritingRing | None] = lambda: None
        self.top_m = top_m if top_m < draft.config.vocab_size else None
        self.slots: dict[str, int] = {}
        self.absorbed: dict[str, int] = {}
        self._free = list(range(max_sequences))[::-1]
        # Those that ended last: nobody needs to wait for what is still to come of them.
        self._ended: dict[str, None] = {}

    def warm_up(self) -> None:
        """Absorb and draft for sequences that are nobody's. Nothing of them stays.

        On a GPU the first round takes longer than a verifier waits: whoever decodes meanwhile would lose their guesses.
        """
        ids = [f"warming up {number}" for number in range(len(ONE_OF_EACH))][: self.memory.slots]
        spans = [Span(sequence_id, 0, 1, reset=True) for sequence_id in ids]
        tapped = (len(self.draft.draft.tapped_layers), self.draft.config.hidden_size)
        rows_RND = torch.zeros(len(ids), *tapped, dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            self.absorb(Verified(spans, rows_RND, [0] * len(ids)))
            for chosen in (ids[:1], ids):
                rows = from_protos(ONE_OF_EACH[: len(chosen)], self.device)
                self.propose([Guess(sequence_id, 1, 0) for sequence_id in chosen], _WARMING_DEPTH, rows)
        self._drop(ids[::-1])

    # --- what the verifier says ---------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """A new subscription begins: whatever is still alive will be replayed."""
        self._drop(list(self.slots))

    def end(self, sequence_ids: list[str]) -> None:
        self._drop(sequence_ids)
        self._ended |= dict.fromkeys(sequence_ids)
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def _drop(self, sequence_ids: list[str]) -> None:
        for sequence_id in sequence_ids:
            if (slot := self.slots.pop(sequence_id, None)) is not None:
                self._free.append(slot)
                del self.absorbed[sequence_id]
                log.debug("sequence ends", sequence=sequence_id)

    def absorb(self, verified: Verified) -> list[str]:
        """Take a message into memory. Returns the sequences that have a gap and need a replay."""
        slots = [self._slot_for(span) for span in verified.spans]
        if isinstance(self.memory, TokenMemory):
            self._absorb_tokens(self.memory, verified, slots)
        else:
            self._absorb_activations(self.memory, verified, slots)
        unused = [span.sequence_id for span, slot in zip(verified.spans, slots, strict=True) if slot is None]
        return [sequence_id for sequence_id in unused if sequence_id in self.slots]

    def _absorb_activations(self, memory: DraftMemory, verified: Verified, slots: list[int | None]) -> None:
        spans, rows_RND = verified.spans, verified.rows_RND
        # By lists, until it is one tensor: each of torch's steps, and of numpy's, costs more than all of this.
        of_slots, positions, ends = list[int](), list[int](), list[int]()
        for span, slot in zip(spans, slots, strict=True):
            end = span.start + span.count
            of_slots += [-1 if slot is None else slot] * span.count
            positions += range(span.start, end)
            ends += [end] * span.count
        numbers_3R = torch.from_numpy(np.array([of_slots, positions, ends]))
        if None in slots:
            used_R = numbers_3R[0] >= 0
            numbers_3R, rows_RND = numbers_3R[:, used_R], rows_RND[used_R]
        slots_R, positions_R, ends_R = numbers_3R.to(self.device)
        memory.absorb(slots_R, positions_R, ends_R, rows_RND.to(self.device, self.dtype))

    def _absorb_tokens(self, memory: TokenMemory, verified: Verified, slots: list[int | None]) -> None:
        first = 0
        for span, slot in zip(verified.spans, slots, strict=True):
            if slot is not None:
                memory.absorb(slot, span.start, verified.tokens[first : first + span.count])
            first += span.count

    def _slot_for(self, span: Span) -> int | None:
        """The slot that a span's rows belong in; None when they cannot be used."""
        held = self.absorbed.get(span.sequence_id)
        if span.reset:
            if held is None:
                log.debug("sequence begins", sequence=span.sequence_id, free_slots=len(self._free))
                if not self._free:
                    return None
                self.slots[span.sequence_id] = self._free.pop()
                self._ended.pop(span.sequence_id, None)
            self.memory.forget(self.slots[span.sequence_id])
        elif held is None or self.draft.draft.sink < held < span.start:
            # Only the window of a replay, which follows the sink, may begin further on.
            return None
        self.absorbed[span.sequence_id] = span.start + span.count
        return self.slots[span.sequence_id]

    # --- what the gateway asks ------------------------------------------------------------------------------------

    def behind(self, guess: Guess) -> bool:
        """Whether verified positions up to the guess's base are still to come: of a sequence that has ended none is."""
        held = self.absorbed.get(guess.sequence_id)
        return guess.sequence_id not in self._ended if held is None else held < guess.base

    def staleness(self, guess: Guess) -> int:
        """How many verified positions up to the guess's base are still to come: all, where nothing has arrived."""
        return max(0, guess.base - self.absorbed.get(guess.sequence_id, 0))

    def check(self, guess: Guess) -> None:
        """Raises UnknownSequence or StaleBlock when no guess can be made from what is held now."""
        absorbed = self.absorbed.get(guess.sequence_id)
        if absorbed is None:
            raise UnknownSequence(f"nothing of sequence {guess.sequence_id!r} has arrived from the verifier")
        if absorbed != guess.base:
            raise StaleBlock(f"sequence {guess.sequence_id!r}: base {guess.base} asked, {absorbed} absorbed")

    def propose(self, guesses: list[Guess], k: int, rows: SamplingRows) -> Drafted:
        """Draft k tokens for each of B sequences in k fixed-shape passes."""
        bases = [guess.base for guess in guesses]
        memory = self.memory.round([self.slots[guess.sequence_id] for guess in guesses], bases, k)
        newest_B = torch.tensor([guess.newest_token for guess in guesses], device=self.device)
        base_B = torch.tensor(bases, device=self.device)
        if isinstance(memory, FusedRound) and self.top_m is None and rows.of_softmax_alone:
            uniforms_BK = rows.uniforms(base_B, k, Purpose.DRAFT)
            ring = self.q_ring()
            there, place = (ring and ring.claim(memory.shape, torch.bfloat16)) or (None, None)
            tokens_BK, probs_BKV = memory.drawn(newest_B, rows.temperature_B, uniforms_BK, there)
            return Drafted(tokens_BK, None, probs_BKV, place)
        return draft_tokens(memory.next_logits, newest_B, base_B, k, rows, self.top_m)
