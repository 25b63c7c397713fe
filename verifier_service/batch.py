"""Items of a round to one padded batch: every check that concerns one item alone, then tensors.

Shapes: B sequences, K draft tokens at most, T = K + 1 (the newest token and the draft's), M candidates of q.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spire.errors import InvalidRequest
from spire.rpc.carrier import OverwritingRingReader
from spire.rpc.tensors import from_wire
from spire.v1 import tensor_pb2
from spire.v1 import verifier_pb2 as pb
from spire.verification import Q_PROBLEMS, SparseDistribution, check_q
from verifier_service.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """What a block may ask for."""

    vocab_size: int
    max_context: int
    max_depth: int


@dataclass(slots=True)
class Item:
    """One item of a VerifyBatch, read once from the message, and what was guessed for it.

    `q`: what its tokens were drawn from, as the message says it, or as its draft said it of all at once and which row
    of that is this one's.
    """

    index: int
    sequence_id: str
    round: int
    base: int
    k: int
    quiet: bool
    tokens: Rows[int]
    q: pb.DraftDistribution | tuple[SharedQ, int] | None

    @classmethod
    def read(cls, item: pb.VerifyItem, index: int) -> Item:
        tokens = item.draft_tokens
        q = item.q if tokens and item.HasField("q") else None
        guess = list(tokens) if tokens else ()
        return cls(index, item.sequence_id, item.round, item.base, item.k, item.quiet, guess, q)


@dataclass(slots=True)
class Q:
    """What k tokens were drawn from: M candidates of each, without ids the whole vocabulary.

    It may lie in a ring, where it can be overwritten until it has been read: at `places` of it. `row`: of a tensor that
    is of many blocks, [X, K, M], this one's.
    """

    probs: Tensor
    width: int
    ids_KM: Tensor | None = None
    row: int | None = None
    ring: OverwritingRingReader | None = None
    places: tuple[pb.RingSlice, ...] = ()

    @property
    def probs_KM(self) -> Tensor:
        return self.probs if self.row is None else self.probs[self.row]

    @property
    def holds(self) -> bool:
        """Whether what was read is what was drawn from."""
        return all(self.ring is not None and self.ring.holds(place) for place in self.places)


@dataclass(slots=True)
class Block:
    """One item that passed its checks: draft tokens after a sequence's newest one, and what they were drawn from."""

    sequence: Sequence
    base: int
    round: int
    tokens: Rows[int]
    q: Q | None = None
    quiet: bool = False

    @property
    def has_its_q(self) -> bool:
        return self.q is None or self.q.holds

    def without_tokens(self) -> Block:
        """The empty block that stands for one whose q is gone."""
        return replace(self, tokens=[], q=None)

    @property
    def k(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        return self.q.width if self.q else 0


@dataclass(frozen=True)
class RaggedBatch:
    """Blocks padded to the longest. `q` is None when no row carries one."""

    slots: list[int]
    counts: list[int]
    tokens_BT: Tensor
    counts_B: Tensor
    base_B: Tensor
    q: SparseDistribution | None
    widths_B: Tensor

    @property
    def draft_BK(self) -> Tensor:
        return self.tokens_BT[:, 1:]

    @classmethod
    def alike(
        cls, slots: list[int], tokens: list[int], base: int, q: SparseDistribution | None, device: torch.device
    ) -> RaggedBatch:
        """A block of the same tokens, newest and drafted, for each slot, standing at `base`."""
        counts = [len(tokens) - 1] * len(slots)
        return cls(
            slots=slots,
            counts=counts,
            tokens_BT=torch.tensor([tokens] * len(slots), device=device),
            counts_B=torch.tensor(counts, device=device),
            base_B=torch.full((len(slots),), base, device=device),
            q=q,
            widths_B=torch.zeros(len(slots), dtype=torch.int64, device=device),
        )


class SharedQ:
    """What the k tokens of each of so many proposals were drawn from, as their draft said it of all at once."""

    def __init__(self, q: pb.DraftDistribution, proposals: int, k: int):
        self._places, self._message = (q.probabilities_slice,), q.probabilities
        self._proposals, self._k = proposals, k
        self._probs_XKV: Tensor | None = None

    def of(self, row: int, vocab_size: int, ring: OverwritingRingReader | None) -> Q | None:
        """One proposal's, where it lies in its draft's ring; None when it is there no more."""
        if self._probs_XKV is None:
            probs_XKV = _read_probabilities(self._message, *self._places, ring)
            if probs_XKV is None:
                return None
            expected = (self._proposals, self._k, vocab_size)
            if probs_XKV.shape != expected:
                raise InvalidRequest(f"q without ids has shape {list(probs_XKV.shape)}, expected {list(expected)}")
            self._probs_XKV = probs_XKV
        return Q(self._probs_XKV, vocab_size, None, row, ring, self._places)


def read_block(
    item: Item, sequence: Sequence, base: int, limits: Limits, q_ring: OverwritingRingReader | None
) -> Block:
    """Check one item against its sequence. Raises InvalidRequest that says what is wrong.

    Draft tokens whose q is no more in its draft's `q_ring` count for nothing: the block is an empty one.
    """
    k = len(item.tokens)
    if k > limits.max_depth:
        raise InvalidRequest(f"{k} draft tokens came, at most {limits.max_depth} are taken")
    if base + k + 1 > limits.max_context:
        raise InvalidRequest(f"positions up to {base + k} do not fit the context of {limits.max_context}")
    if k and (largest := max(item.tokens)) >= limits.vocab_size:
        raise InvalidRequest(f"draft token {largest} is outside the vocabulary of {limits.vocab_size}")
    if k == 0 or not sequence.needs_q:
        return Block(sequence, base, item.round, item.tokens, None, item.quiet)
    if item.q is None:
        raise InvalidRequest("q is missing: a sampled sequence needs what its draft tokens were drawn from")
    if isinstance(item.q, tuple):
        shared, row = item.q
        q = shared.of(row, limits.vocab_size, q_ring)
    else:
        q = _read_q(item.q, k, limits.vocab_size, q_ring)
    return Block(sequence, base, item.round, item.tokens if q else [], q, item.quiet)


def _read_q(q: pb.DraftDistribution, k: int, vocab_size: int, ring: OverwritingRingReader | None) -> Q | None:
    """None when it has been overwritten."""
    places = tuple(place for place in (q.ids_slice, q.probabilities_slice) if place.length)
    probs_KM = _read_probabilities(q.probabilities, q.probabilities_slice, ring)
    if probs_KM is None:
        return None
    if not q.HasField("ids"):
        if probs_KM.shape != (k, vocab_size):
            raise InvalidRequest(f"q without ids has shape {list(probs_KM.shape)}, expected [{k}, {vocab_size}]")
        return Q(probs_KM, vocab_size, None, None, ring, places)
    ids_KM = _read_tensor(q.ids, q.ids_slice, ring, torch.int32)
    if ids_KM is None:
        return None
    fits = ids_KM.ndim == 2 and len(ids_KM) == k and 0 < ids_KM.shape[1] <= vocab_size
    if ids_KM.shape != probs_KM.shape or not fits:
        raise InvalidRequest(
            f"q has ids of shape {list(ids_KM.shape)} and probabilities of shape {list(probs_KM.shape)}, "
            f"expected [{k}, m] for both, m at most {vocab_size}"
        )
    return Q(probs_KM, probs_KM.shape[1], ids_KM, None, ring, places)


def _read_probabilities(
    message: tensor_pb2.Tensor, place: pb.RingSlice, ring: OverwritingRingReader | None
) -> Tensor | None:
    probs = _read_tensor(message, place, ring)
    if probs is not None and not probs.is_floating_point():
        raise InvalidRequest("q has probabilities that are no floating-point numbers")
    return probs


def _read_tensor(
    message: tensor_pb2.Tensor,
    place: pb.RingSlice,
    ring: OverwritingRingReader | None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    if not place.length:
        return from_wire(message, dtype)
    return ring.view(message, place, dtype) if ring else None


def pad(blocks: Rows[Block], device: torch.device) -> RaggedBatch:
    """One tensor per field, short rows padded with token 0."""
    counts = [block.k for block in blocks]
    K = max(counts)
    tokens_BT = np.array([[block.sequence.newest, *block.tokens, *[0] * (K - block.k)] for block in blocks])
    numbers = np.array([counts, [block.base for block in blocks], [block.width for block in blocks]])
    counts_B, base_B, widths_B = torch.from_numpy(numbers).to(device)
    return RaggedBatch(
        slots=[block.sequence.slot for block in blocks],
        counts=counts,
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        counts_B=counts_B,
        base_B=base_B,
        q=_pad_q(blocks, K, device),
        widths_B=widths_B,
    )


def _pad_q(blocks: Rows[Block], K: int, device: torch.device) -> SparseDistribution | None:
    """All of it in one place."""
    of_blocks = [block.q for block in blocks]
    carried = [q for q in of_blocks if q]
    if not carried:
        return None
    first, M = carried[0], max(q.width for q in carried)
    if first.row is not None and first.probs.shape[1] == K and all(q.probs is first.probs for q in carried):
        return SparseDistribution.whole_of(first.probs, [q.row if q else None for q in of_blocks], device)
    if all(q.ids_KM is None for q in carried):
        return SparseDistribution.whole([q.probs_KM if q else None for q in of_blocks], K, M, device)
    probs_BKM, ids_BKM = torch.zeros(len(blocks), K, M), torch.zeros(len(blocks), K, M, dtype=torch.int64)
    for row, (block, q) in enumerate(zip(blocks, of_blocks, strict=True)):
        if q:
            probs_BKM[row, : block.k, : q.width] = q.probs_KM
            ids_BKM[row, : block.k, : q.width] = torch.arange(q.width) if q.ids_KM is None else q.ids_KM
    return SparseDistribution(ids_BKM.to(device), probs_BKM.to(device))


def q_problems(batch: RaggedBatch, vocab_size: int) -> list[str]:
    """Per row what is wrong with its q, empty when nothing is. Rows without q are sound."""
    if batch.q is None:
        return [""] * len(batch.counts)
    carried_B = torch.where(batch.widths_B > 0, batch.counts_B, 0)
    found = check_q(batch.q, batch.draft_BK, carried_B, batch.widths_B, vocab_size).tolist()
    return [Q_PROBLEMS[problem] for problem in found]
