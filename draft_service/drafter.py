"""The drafter: absorbs activations of verified positions and proposes draft tokens. All methods run on one thread.

The drafter is a deterministic function of the verifier's stream and of the requests: after a crash, a replay restores
its state. Per-sequence work is integer bookkeeping; every tensor operation covers the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from torch import Tensor

from spire.decoding.drafting import Drafted, DraftItem, RoundInputs, Stopping
from spire.decoding.sampling import SamplingRows
from spire.errors import OutOfCapacity, StaleBlock, UnknownSequence
from spire.model.backends.reference import Reference
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory
from spire.model.token_memory import TokenMemory
from spire.rpc.carrier import OverwritingRing
from spire.rpc.sampling import ONE_OF_EACH, from_protos
from spire.v1.verifier_pb2 import RingSlice

# The most ended sequences to remember: more than can end during one round.
_ENDED_KEPT = 4096

_WARMING_DEPTH = 2

log = structlog.get_logger("draft_service")


@dataclass(slots=True)
class Span:
    """Verified positions start .. start + count - 1 of one sequence; `reset` marks the start of a replay."""

    sequence_id: str
    start: int
    count: int
    reset: bool


@dataclass(frozen=True)
class Verified:
    """Activations of N tapped layers [R, N, D] at R verified positions, and the R tokens if the draft needs tokens."""

    spans: list[Span]
    rows_RND: Tensor
    tokens: list[int]


class Drafter:
    """Absorbs activations into a slot per sequence, and drafts tokens.

    `max_context`: the most positions per sequence. `budget`: the bytes for keys and values of a draft that receives
    tokens; None: as much as all sequences need.
    """

    def __init__(
        self,
        draft: Draft,
        max_sequences: int,
        top_m: int,
        max_context: int,
        backend: Reference,
        budget: int | None = None,
    ):
        self.draft, self._backend = draft, backend
        self.memory: DraftMemory | TokenMemory = (
            backend.memory(draft, max_sequences)
            if draft.draft.tapped_layers
            else TokenMemory(draft, max_sequences, max_context, budget)
        )
        self.device, self.dtype = draft.embed_tokens.weight.device, draft.embed_tokens.weight.dtype
        # Returns the ring from which the verifier reads q, if both run on this host.
        self.q_ring: Callable[[], OverwritingRing | None] = lambda: None
        # A draft with a vocabulary of its own sends its whole distribution.
        self.top_m = top_m if draft.vocabulary is None and top_m < draft.config.vocab_size else None
        self.slots: dict[str, int] = {}
        self.absorbed: dict[str, int] = {}
        self._free = list(range(max_sequences))[::-1]
        # The sequences that ended or found no slot last, oldest first: requests do not wait for their activations.
        self._ended: dict[str, None] = {}

    def warm_up(self) -> None:
        """Run rounds for dummy sequences, because the first round on a GPU takes longer than the verifier's timeout."""
        ids = [f"warming up {number}" for number in range(len(ONE_OF_EACH))][: self.memory.slots]
        spans = [Span(sequence_id, 0, 1, reset=True) for sequence_id in ids]
        tapped = (len(self.draft.draft.tapped_layers), self.draft.config.hidden_size)
        rows_RND = torch.zeros(len(ids), *tapped, dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            self.absorb(Verified(spans, rows_RND, [0] * len(ids)))
            for chosen in (ids[:1], ids):
                rows = from_protos(ONE_OF_EACH[: len(chosen)], self.device)
                self.propose([DraftItem(sequence_id, 1, 0) for sequence_id in chosen], _WARMING_DEPTH, rows)
        self._drop(ids[::-1])

    # --- activations --------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Drop all sequences: a new subscription replays those that are still live."""
        self._drop(list(self.slots))

    def end(self, sequence_ids: list[str]) -> None:
        self._drop(sequence_ids)
        self._ended |= dict.fromkeys(sequence_ids)
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def _drop(self, sequence_ids: list[str]) -> None:
        for sequence_id in sequence_ids:
            if (slot := self.slots.pop(sequence_id, None)) is not None:
                self.memory.forget(slot)
                self._free.append(slot)
                del self.absorbed[sequence_id]
                log.debug("sequence ends", sequence=sequence_id)

    def absorb(self, verified: Verified) -> list[str]:
        """Absorb the activations of a message. Return the ids of sequences that have a gap and need a replay."""
        slots = [self._slot_for(span) for span in verified.spans]
        if isinstance(self.memory, TokenMemory):
            self._absorb_tokens(self.memory, verified, slots)
        else:
            self._absorb_activations(self.memory, verified, slots)
        unused = [span.sequence_id for span, slot in zip(verified.spans, slots, strict=True) if slot is None]
        return [sequence_id for sequence_id in unused if sequence_id in self.slots]

    def _absorb_activations(self, memory: DraftMemory, verified: Verified, slots: list[int | None]) -> None:
        spans, rows_RND = verified.spans, verified.rows_RND
        # Collect in lists and convert once: a single call of torch or numpy takes longer than this loop.
        of_slots, positions, ends = list[int](), list[int](), list[int]()
        for span, slot in zip(spans, slots, strict=True):
            end = span.start + span.count
            of_slots += [-1 if slot is None else slot] * span.count
            positions += range(span.start, end)
            ends += [end] * span.count
        slots_R, positions_R, ends_R = np.array([of_slots, positions, ends])
        sink, window = self.draft.draft.sink, self.draft.draft.window
        # Sorted out here and not in the memory, where a GPU would have to be waited for.
        used_R = (slots_R >= 0) & ((positions_R < sink) | (positions_R >= ends_R - window))
        numbers_2R = torch.from_numpy(np.stack((slots_R, positions_R)))
        if not used_R.all():
            used = torch.from_numpy(used_R.nonzero()[0])
            numbers_2R, rows_RND = numbers_2R[:, used], rows_RND.index_select(0, used.to(rows_RND.device))
        of_slots_R, at_R = numbers_2R.to(self.device)
        memory.absorb(of_slots_R, at_R, rows_RND.to(self.device, self.dtype))

    def _absorb_tokens(self, memory: TokenMemory, verified: Verified, slots: list[int | None]) -> None:
        first = 0
        for span, slot in zip(verified.spans, slots, strict=True):
            if slot is not None:
                try:
                    memory.absorb(slot, span.start, verified.tokens[first : first + span.count])
                except OutOfCapacity as error:
                    log.debug("decoded plainly from now on", sequence=span.sequence_id, reason=str(error))
                    self.end([span.sequence_id])
            first += span.count

    def _slot_for(self, span: Span) -> int | None:
        """Return the memory slot for a span's rows, cleared if a replay begins; None if the rows cannot be used."""
        held = self.absorbed.get(span.sequence_id)
        if span.reset:
            if held is None:
                log.debug("sequence begins", sequence=span.sequence_id, free_slots=len(self._free))
                if not self._free:
                    self.end([span.sequence_id])
                    return None
                self.slots[span.sequence_id] = self._free.pop()
                self._ended.pop(span.sequence_id, None)
            self.memory.forget(self.slots[span.sequence_id])
        elif held is None or self.draft.draft.sink < held < span.start:
            # A gap: only the window of a replay, which follows the sink, may skip positions.
            return None
        self.absorbed[span.sequence_id] = span.start + span.count
        return self.slots[span.sequence_id]

    # --- draft requests -------------------------------------------------------------------------------------------

    def behind(self, item: DraftItem) -> bool:
        """True if any position before the item's base is not absorbed yet; False for every ended sequence."""
        held = self.absorbed.get(item.sequence_id)
        return item.sequence_id not in self._ended if held is None else held < item.base

    def staleness(self, item: DraftItem) -> int:
        """Return the number of positions before the item's base that are not absorbed yet."""
        return max(0, item.base - self.absorbed.get(item.sequence_id, 0))

    def check(self, item: DraftItem) -> None:
        """Raise UnknownSequence or StaleBlock unless exactly the positions before the item's base are absorbed."""
        absorbed = self.absorbed.get(item.sequence_id)
        if absorbed is None:
            raise UnknownSequence(f"nothing of sequence {item.sequence_id!r} has arrived from the verifier")
        if absorbed != item.base:
            raise StaleBlock(f"sequence {item.sequence_id!r}: base {item.base} asked, {absorbed} absorbed")

    def propose(self, items: list[DraftItem], k: int, rows: SamplingRows) -> Drafted:
        """Draft k tokens for each of B sequences, fewer where they stop, in at most k passes."""
        bases = [item.base for item in items]
        round_ = self.memory.round([self.slots[item.sequence_id] for item in items], bases, k)
        newest_B = torch.tensor([item.newest_token for item in items], device=self.device)
        base_B = torch.tensor(bases, device=self.device)
        inputs = RoundInputs(newest_B, base_B, k, rows, self.top_m, self.draft.vocabulary, self._stop(items))
        return self._backend.draft(round_, inputs, self._claim)

    def _stop(self, items: list[DraftItem]) -> Stopping | None:
        """Return when to stop drafting for each item; None if nobody stops, or this draft has no stop head."""
        head, least = self.draft.stop_head, [item.least_standing for item in items]
        return Stopping(head, torch.tensor(least, device=self.device)) if head and any(least) else None

    def _claim(self, shape: tuple[int, int, int]) -> tuple[Tensor, RingSlice] | None:
        ring = self.q_ring()
        return ring.claim(shape, torch.bfloat16) if ring else None
