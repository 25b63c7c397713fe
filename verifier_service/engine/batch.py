"""The items of a VerifyBatch, and the blocks of a round as one padded batch.

Shapes: B sequences, K draft tokens at most, T = K + 1 (the newest token and the draft tokens), M candidates of q.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Rows
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from spire.decoding.verification import Q_PROBLEMS, SparseDistribution, check_q
from spire.errors import InvalidRequest
from spire.rpc.carrier import OverwritingRingReader
from spire.rpc.tensors import from_wire
from spire.v1 import tensor_pb2, verifier_pb2 as pb
from verifier_service.engine.sequence import HeldSequence, Reply


@dataclass(frozen=True)
class Limits:
    """The limits of every block of draft tokens to verify: token ids, positions, number of draft tokens."""

    vocab_size: int
    max_context: int
    max_depth: int


@dataclass(slots=True)
class Item:
    """One item of a VerifyBatch, copied from the message, with its draft tokens and, after the step, its `result`.

    `q` reads the distribution that the draft tokens were drawn from. `undrafted`: the reason why a block that should
    have draft tokens is decoded plainly.
    """

    sequence_id: str
    round: int
    base: int
    k: int
    paused: bool
    tokens: Rows[int]
    q: ReadQ | None
    least_standing: float = 0.0
    undrafted: pb.Undrafted = pb.UNDRAFTED_UNSPECIFIED
    result: pb.VerifyResult | None = None

    @classmethod
    def read(cls, item: pb.VerifyItem) -> Item:
        tokens = list(item.draft_tokens)
        q = partial(read_q, item.q) if tokens and item.HasField("q") else None
        return cls(item.sequence_id, item.round, item.base, item.k, item.paused, tokens, q, item.least_standing)


@dataclass
class VerifyTask:
    """One VerifyBatch and its items, from arrival until the batch is answered."""

    batch: pb.VerifyBatch
    gateway: str
    reply: Reply
    received: float = field(default_factory=time.perf_counter)
    # True once its draft requests have been sent; the number of requests still `awaited`; the timings of the draft with
    # the longest forward.
    asked: bool = False
    awaited: int = 0
    drafting: pb.Timings = field(default_factory=pb.Timings)
    # The longest time from a draft request to its reply.
    drafting_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.items = [Item.read(item) for item in self.batch.items]
        self.sequence_ids = frozenset(item.sequence_id for item in self.items)


@dataclass(slots=True)
class Q:
    """The distributions that k draft tokens were drawn from, over M tokens: `ids`, or `vocabulary`, or all if None.

    `vocab_size`: the size of the whole vocabulary. `row`: the row of this block, if the tensors [X, K, M] belong to
    many blocks. `ring` and `places`: the location of q in shared memory, if any; the draft may overwrite q before the
    verifier has read it.
    """

    probs: Tensor
    width: int
    ids: Tensor | None = None
    row: int | None = None
    ring: OverwritingRingReader | None = None
    places: tuple[pb.RingSlice, ...] = ()
    vocabulary: Tensor | None = None
    vocab_size: int = 0

    @property
    def probs_KM(self) -> Tensor:
        return self.probs if self.row is None else self.probs[self.row]

    @property
    def ids_KM(self) -> Tensor | None:
        return self.ids if self.row is None or self.ids is None else self.ids[self.row]

    def over_all(self, k: int) -> Tensor:
        """Return the first k distributions over the whole vocabulary, [k, V], if there are no `ids`."""
        vocabulary_M = None if self.vocabulary is None else self.vocabulary.to(self.probs.device)
        own = SparseDistribution(None, self.probs_KM[None, :k], vocabulary_M=vocabulary_M)
        return own.spread(self.vocab_size).probs_BKM[0]

    @property
    def holds(self) -> bool:
        """True while this q is valid: the draft has not reused the shared memory in which it lies."""
        return all(self.ring is not None and self.ring.holds(place) for place in self.places)


# Reads the q of one block, given k, the vocabulary's size, and the ring of the draft. Returns None if the q has been
# overwritten, raises InvalidRequest for wrong shapes.
ReadQ = Callable[[int, int, OverwritingRingReader | None], Q | None]


@dataclass(slots=True)
class Block:
    """A valid item as a block: the draft tokens that follow the sequence's newest token, and their q."""

    sequence: HeldSequence
    base: int
    task: VerifyTask
    item: Item
    tokens: Rows[int]
    q: Q | None = None

    def empty(self) -> None:
        """Drop the draft tokens and their q."""
        self.tokens, self.q = [], None

    @property
    def k(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        return self.q.width if self.q else 0


@dataclass(frozen=True)
class RaggedBatch:
    """B blocks padded to the length of the longest. `q` is None if no block has a q.

    `parts`: the numbers of consecutive blocks that are computed together, padded to the longest of these blocks only.
    """

    slots: list[int]
    counts: list[int]
    tokens_BT: Tensor
    counts_B: Tensor
    base_B: Tensor
    q: SparseDistribution | None
    widths_B: Tensor
    parts: list[int]

    @property
    def draft_BK(self) -> Tensor:
        return self.tokens_BT[:, 1:]

    def rectangles(self) -> list[tuple[list[int], Tensor]]:
        """Return the slots and the padded tokens [B, T] of each part."""
        bounds = pairwise(accumulate(self.parts, initial=0))
        return [(self.slots[at:end], self.tokens_BT[at:end, : 1 + max(self.counts[at:end])]) for at, end in bounds]

    @property
    def positions(self) -> int:
        """The number of positions that are computed, padding included."""
        return sum(tokens_BT.numel() for _, tokens_BT in self.rectangles())


class SharedQ:
    """The q of several blocks, sent by one draft in one message. Its `shape` is [blocks, k], but a block has at most
    `deepest` tokens."""

    def __init__(self, q: pb.DraftDistribution, shape: tuple[int, int], deepest: int):
        self._message, self._shape, self._deepest = q, shape, deepest
        self._q: Q | None = None

    def of(self, row: int, _: int, vocab_size: int, ring: OverwritingRingReader | None) -> Q | None:
        """Return the q of block `row`; None if the q has been overwritten. Raises InvalidRequest for a wrong shape."""
        self._q = self._q or _read_q(self._message, self._shape, vocab_size, ring, self._deepest)
        q = self._q
        return replace(q, row=row) if q else None


def read_q(q: pb.DraftDistribution, k: int, vocab_size: int, ring: OverwritingRingReader | None) -> Q | None:
    """Return the q of one block; None if the q has been overwritten. Raises InvalidRequest for wrong shapes."""
    return _read_q(q, (k,), vocab_size, ring)


def _read_q(
    q: pb.DraftDistribution,
    leading: tuple[int, ...],
    vocab_size: int,
    ring: OverwritingRingReader | None,
    deepest: int | None = None,
) -> Q | None:
    """Return q as tensors of shape [*leading, M], of whose k rows only the first `deepest` are read."""
    places = tuple(place for place in (q.ids_slice, q.probabilities_slice) if place.length)
    probs = _read_probs(q.probabilities, q.probabilities_slice, ring)
    if probs is None:
        return None
    if not q.HasField("ids"):
        if probs.shape != (*leading, vocab_size):
            raise InvalidRequest(f"q without ids has shape {list(probs.shape)}, expected {[*leading, vocab_size]}")
        return Q(probs[..., :deepest, :], vocab_size, None, None, ring, places)
    ids = _read_tensor(q.ids, q.ids_slice, ring, torch.int32)
    if ids is None:
        return None
    if ids.ndim == 1:
        if probs.shape != (*leading, len(ids)):
            expected = [*leading, len(ids)]
            raise InvalidRequest(f"q over {len(ids)} tokens has shape {list(probs.shape)}, expected {expected}")
        vocabulary = _vocabulary(ids.cpu().numpy().tobytes(), vocab_size)
        return Q(probs[..., :deepest, :], len(ids), None, None, ring, places, vocabulary, vocab_size)
    fits = ids.ndim == len(leading) + 1 and ids.shape[:-1] == leading and 0 < ids.shape[-1] <= vocab_size
    if ids.shape != probs.shape or not fits:
        raise InvalidRequest(
            f"q has ids of shape {list(ids.shape)} and probabilities of shape {list(probs.shape)}, "
            f"expected [{', '.join(map(str, leading))}, m] for both, m at most {vocab_size}"
        )
    return Q(probs[..., :deepest, :], probs.shape[-1], ids[..., :deepest, :], None, ring, places)


@lru_cache(maxsize=16)
def _vocabulary(ids: bytes, vocab_size: int) -> Tensor:
    """Return the tokens that a draft proposes, int64 [M], given as int32. A draft sends the same ones every round.

    Raises InvalidRequest for ids that do not ascend or are outside of the vocabulary.
    """
    ids_M = torch.from_numpy(np.frombuffer(ids, np.int32).astype(np.int64))
    steps = ids_M.diff(prepend=ids_M.new_full((1,), -1), append=ids_M.new_full((1,), vocab_size))
    if not len(ids_M) or not bool((steps > 0).all()):
        raise InvalidRequest(f"the tokens of q must ascend and lie below {vocab_size}")
    return ids_M


def _read_probs(message: tensor_pb2.Tensor, place: pb.RingSlice, ring: OverwritingRingReader | None) -> Tensor | None:
    probs = _read_tensor(message, place, ring, None)
    if probs is not None and not probs.is_floating_point():
        raise InvalidRequest("q has probabilities that are no floating-point numbers")
    return probs


def _read_tensor(
    message: tensor_pb2.Tensor, place: pb.RingSlice, ring: OverwritingRingReader | None, dtype: torch.dtype | None
) -> Tensor | None:
    if not place.length:
        return from_wire(message, dtype)
    return ring.view(message, place, dtype) if ring else None


def pad(blocks: Rows[Block], device: torch.device) -> RaggedBatch:
    """Combine these blocks into one batch, padding short rows with token 0.

    Consecutive blocks of the same depth are a part. On a GPU, all blocks are: the graphs of one batch cost less than
    those of several parts.
    """
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
        parts=[len(list(alike)) for _, alike in groupby(counts)] if device.type == "cpu" else [len(blocks)],
    )


def _pad_q(blocks: Rows[Block], K: int, device: torch.device) -> SparseDistribution | None:
    """Combine the q of all blocks into one padded distribution [B, K, M]; None if no block has a q."""
    of_blocks = [block.q for block in blocks]
    carried = [q for q in of_blocks if q]
    if not carried:
        return None
    first, M = carried[0], max(q.width for q in carried)
    vocabulary_M = None if first.vocabulary is None else first.vocabulary.to(device)
    together = first.row is not None and first.probs.shape[1] >= K and all(q.probs is first.probs for q in carried)
    # What lies behind the tokens of a block whose draft stopped may be anything.
    whole = first.ids is not None or all(block.k == K for block in blocks if block.q)
    if together and whole:
        rows, ids_XKM = [q.row if q else None for q in of_blocks], None if first.ids is None else first.ids[:, :K]
        return SparseDistribution.of_rows(ids_XKM, first.probs[:, :K], rows, device, vocabulary_M)
    if all(q.ids is None and q.vocabulary is first.vocabulary for q in carried):
        rows_KM = [q.probs_KM[: block.k] if q else None for block, q in zip(blocks, of_blocks, strict=True)]
        return SparseDistribution.whole(rows_KM, K, M, device, vocabulary_M)
    if all(q.ids is None for q in carried):  # of drafts with different vocabularies
        rows_KV = [q.over_all(block.k) if q else None for block, q in zip(blocks, of_blocks, strict=True)]
        return SparseDistribution.whole(rows_KV, K, max(q.vocab_size or q.width for q in carried), device)
    # Where q lies: a row that has to change the device is waited for.
    probs_BKM = torch.zeros(len(blocks), K, M, device=first.probs.device)
    ids_BKM = torch.zeros(probs_BKM.shape, dtype=torch.int64, device=probs_BKM.device)
    every_id_V = torch.arange(M, device=probs_BKM.device)
    for row, (block, q) in enumerate(zip(blocks, of_blocks, strict=True)):
        if q:
            probs_BKM[row, : block.k, : q.width] = q.probs_KM[: block.k]
            own = every_id_V[: q.width] if q.vocabulary is None else q.vocabulary.to(ids_BKM.device)
            ids_BKM[row, : block.k, : q.width] = own if q.ids_KM is None else q.ids_KM[: block.k]
    return SparseDistribution(ids_BKM.to(device), probs_BKM.to(device))


def q_problems(batch: RaggedBatch, vocab_size: int) -> list[str]:
    """Return an error message for each row with an invalid q, and an empty string for every other row."""
    if batch.q is None:
        return [""] * len(batch.counts)
    carried_B = torch.where(batch.widths_B > 0, batch.counts_B, 0)
    found = check_q(batch.q, batch.draft_BK, carried_B, batch.widths_B, vocab_size).tolist()
    return [Q_PROBLEMS[problem] for problem in found]
