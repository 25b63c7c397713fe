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
class Block:
    """One item that passed its checks: draft tokens after a sequence's newest one, and what they were drawn from.

    q may lie in a ring, where it can be overwritten until it has been read: at `places` of it.
    """

    sequence: Sequence
    base: int
    round: int
    tokens: Rows[int]
    # Without ids a q is over the whole vocabulary.
    q_ids_KM: Tensor | None
    q_probs_KM: Tensor | None
    quiet: bool = False
    ring: OverwritingRingReader | None = None
    places: tuple[pb.RingSlice, ...] = ()

    @property
    def has_its_q(self) -> bool:
        """Whether what was read of q is what was drawn from."""
        return all(self.ring is not None and self.ring.holds(place) for place in self.places)

    def without_tokens(self) -> Block:
        """The empty block that stands for one whose q is gone."""
        return replace(self, tokens=[], q_ids_KM=None, q_probs_KM=None, places=())

    @property
    def k(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        return 0 if self.q_probs_KM is None else self.q_probs_KM.shape[1]


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


class SharedQ:
    """What the tokens of so many proposals were drawn from, as their draft said it of all at once: looked up once."""

    def __init__(self, q: pb.DraftDistribution, proposals: int):
        self.places = (q.probabilities_slice,)
        self._message, self._proposals = q.probabilities, proposals
        self._rows: tuple[Tensor, ...] | None = None

    def row(self, row: int, ring: OverwritingRingReader | None) -> Tensor | None:
        """One proposal's, [K, V], where it lies in its draft's ring; None when it is there no more."""
        if self._rows is None:
            probs_BKV = _read_probabilities(self._message, *self.places, ring)
            if probs_BKV is None:
                return None
            if probs_BKV.ndim != 3 or len(probs_BKV) != self._proposals:
                raise InvalidRequest(f"q has the shape {list(probs_BKV.shape)} for {self._proposals} proposals")
            self._rows = probs_BKV.unbind()
        return self._rows[row]


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
        return Block(sequence, base, item.round, item.tokens, None, None, item.quiet)
    if item.q is None:
        raise InvalidRequest("q is missing: a sampled sequence needs what its draft tokens were drawn from")
    if isinstance(item.q, tuple):
        shared, row = item.q
        found, places = _read_shared_q(shared, row, k, limits.vocab_size, q_ring), shared.places
    else:
        found = _read_q(item.q, k, limits.vocab_size, q_ring)
        places = tuple(place for place in (item.q.ids_slice, item.q.probabilities_slice) if place.length)
    if found is None:
        return Block(sequence, base, item.round, [], None, None, item.quiet)
    return Block(sequence, base, item.round, item.tokens, *found, item.quiet, q_ring, places)


def _read_shared_q(
    shared: SharedQ, row: int, k: int, vocab_size: int, ring: OverwritingRingReader | None
) -> tuple[Tensor | None, Tensor] | None:
    probs_KV = shared.row(row, ring)
    return None if probs_KV is None else (None, _whole(probs_KV, k, vocab_size))


def _whole(probs_KV: Tensor, k: int, vocab_size: int) -> Tensor:
    """The same, if it can be the probabilities of k positions over the whole vocabulary."""
    if probs_KV.shape != (k, vocab_size):
        raise InvalidRequest(f"q without ids has shape {list(probs_KV.shape)}, expected [{k}, {vocab_size}]")
    return probs_KV


def _read_q(
    q: pb.DraftDistribution, k: int, vocab_size: int, ring: OverwritingRingReader | None
) -> tuple[Tensor | None, Tensor] | None:
    """Ids, if there are any, and probabilities; None when they have been overwritten."""
    probs_KM = _read_probabilities(q.probabilities, q.probabilities_slice, ring)
    if probs_KM is None:
        return None
    if not q.HasField("ids"):
        return None, _whole(probs_KM, k, vocab_size)
    ids_KM = _read_tensor(q.ids, q.ids_slice, ring, torch.int32)
    if ids_KM is None:
        return None
    fits = ids_KM.ndim == 2 and len(ids_KM) == k and 0 < ids_KM.shape[1] <= vocab_size
    if ids_KM.shape != probs_KM.shape or not fits:
        raise InvalidRequest(
            f"q has ids of shape {list(ids_KM.shape)} and probabilities of shape {list(probs_KM.shape)}, "
            f"expected [{k}, m] for both, m at most {vocab_size}"
        )
    return ids_KM, probs_KM


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
    carried = [block.q_probs_KM for block in blocks if block.q_probs_KM is not None]
    if not carried:
        return None
    M = max(probs_KM.shape[1] for probs_KM in carried)
    if all(block.q_ids_KM is None for block in blocks):
        return SparseDistribution.whole([block.q_probs_KM for block in blocks], K, M, device)
    probs_BKM, ids_BKM = torch.zeros(len(blocks), K, M), torch.zeros(len(blocks), K, M, dtype=torch.int64)
    for row, block in enumerate(blocks):
        if block.q_probs_KM is not None:
            probs_BKM[row, : block.k, : block.width] = block.q_probs_KM
            ids_BKM[row, : block.k, : block.width] = (
                torch.arange(block.width) if block.q_ids_KM is None else block.q_ids_KM
            )
    return SparseDistribution(ids_BKM.to(device), probs_BKM.to(device))


def q_problems(batch: RaggedBatch, vocab_size: int) -> list[str]:
    """Per row what is wrong with its q, empty when nothing is. Rows without q are sound."""
    if batch.q is None:
        return [""] * len(batch.counts)
    carried_B = torch.where(batch.widths_B > 0, batch.counts_B, 0)
    found = check_q(batch.q, batch.draft_BK, carried_B, batch.widths_B, vocab_size).tolist()
    return [Q_PROBLEMS[problem] for problem in found]
