"""The feed of one draft: a bounded tail of activations stored for replay, and the positions not yet sent.

Shapes: R rows (positions of all sequences one after the other), N tapped layers, D width.
Does not know: other drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spire.errors import InvalidRequest, MismatchError
from spire.model.cache.pool import Pool
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.limits import MAX_TAPPED_POSITIONS
from spire.rpc.tensors import host_bytes
from spire.v1 import draft_pb2 as pb, verifier_pb2
from verifier_service.feed.delivery import NO_ROWS, Deliver, Delivery, Picked, spans_of

# The last positions of a copied prompt that are computed nevertheless, at most a draft's window: with their activations
# a draft begins to guess. Computing the whole window takes longer than the first rounds gain from it.
LEAST_COMPUTED = 16
# The most positions, at the beginnings of texts, whose activations are remembered.
_MOST_REMEMBERED = 64

# The most rows that may be deferred: processing many together takes hardly longer than processing a few.
MOST_PENDING = 256

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Taps:
    """A draft's subscription: the layers whose inputs it needs, sizes of sink and window, whether it needs tokens."""

    layers: tuple[int, ...]
    sink: int
    window: int
    tokens: bool = False

    @classmethod
    def read(cls, request: pb.Subscription, target: verifier_pb2.GetInfoResponse) -> Taps:
        """Check and convert a subscription. Raises InvalidRequest, or MismatchError naming both services' values."""
        if (theirs := request.protocol_version) != PROTOCOL_VERSION:
            raise MismatchError(f"the draft speaks protocol {theirs}, the verifier {PROTOCOL_VERSION}")
        wanted, ours = request.target_fingerprint, target.target_fingerprint
        if wanted != ours:
            raise MismatchError(f"the draft belongs to target {wanted}, the verifier serves {ours}")
        if not request.draft_id or request.window == 0 or bool(request.tapped_layers) == request.tokens:
            raise InvalidRequest(
                "a subscription needs a draft_id, a window of at least 1, and either tapped layers or tokens"
            )
        if (highest := max(request.tapped_layers, default=0)) >= target.num_layers:
            raise InvalidRequest(f"tapped layer {highest} does not exist: the target has {target.num_layers}")
        if len(set(request.tapped_layers)) < len(request.tapped_layers):
            raise InvalidRequest(f"a layer is tapped twice: {list(request.tapped_layers)}")
        # Memory for sink and window is allocated per sequence, and no sequence is longer than the context.
        sink, window = (min(count, target.max_context) for count in (request.sink, request.window))
        if request.tapped_layers and sink + window > MAX_TAPPED_POSITIONS:
            raise MismatchError(
                f"the draft asks for the activations of {sink + window} positions of every sequence (sink {sink}, "
                f"window {window}), the verifier keeps {MAX_TAPPED_POSITIONS} at most: train one with a smaller window"
            )
        return cls(tuple(request.tapped_layers), sink, window, request.tokens)


@dataclass(slots=True)
class Advance:
    """Tokens committed in a sequence from position `start` on. If `paused`, activations are not sent yet."""

    sequence_id: str
    draft_id: str
    slot: int
    start: int
    tokens: list[int]
    paused: bool = False

    @property
    def count(self) -> int:
        return len(self.tokens)


class Feed:
    """The taps of one draft, the stored activations (tails) of its sequences, and `deliver` while it is subscribed."""

    def __init__(self, taps: Taps, slots: int, width: int, dtype: torch.dtype, device: torch.device):
        self.taps = taps
        self.deliver: Deliver | None = None
        # sequence id -> (slot, committed length)
        self.members: dict[str, tuple[int, int]] = {}
        # sequence id -> its tokens, a list shared with the engine: ignore tokens from the committed length on
        self._tokens: dict[str, list[int]] = {}
        # sequence id -> the first position not sent to the draft, because the sequence was paused
        self._unsent: dict[str, int] = {}
        # sequence id -> its first position behind the sink that was computed, if those before were copied
        self._first: dict[str, int] = {}
        # The activations of the sink, which depend on its tokens only, by these tokens.
        self._sinks: dict[tuple[int, ...], Tensor] = {}
        # Advances and their rows that are not yet written to the tails.
        self._pending: list[tuple[Rows[Advance], Tensor]] = []
        self._pending_rows = 0
        self._entries, self._tapped = taps.sink + taps.window, (len(taps.layers), width)
        # The tails of all slots; None without sequences. On a CPU memory is allocated only when written.
        self._pool: Pool | None = None
        self._no_row = torch.zeros(0, *self._tapped, dtype=dtype, device=device)
        self._shape = slots, 1, self._entries, len(taps.layers) * width

    @property
    def _tails(self) -> Tensor:
        """The activations stored for replay (tails), by slot and entry, [slots, sink + window, N, D]."""
        if self._pool is None:
            self._pool = Pool(self._shape, self._no_row.dtype, self._no_row.device)
        return self._pool.tensor.view(-1, self._entries, *self._tapped)

    def join(self, sequence_id: str, slot: int, tokens: list[int]) -> None:
        self.members[sequence_id], self._tokens[sequence_id] = (slot, 0), tokens

    def leave(self, sequence_id: str) -> bool:
        """Forget a sequence. Return False if the sequence is not in this feed."""
        if sequence_id not in self.members:
            return False
        del self._tokens[sequence_id]
        self._unsent.pop(sequence_id, None)
        self._first.pop(sequence_id, None)
        slot, _ = self.members.pop(sequence_id)
        if not self.members:
            self._pool, self._pending, self._pending_rows = None, [], 0
        elif self._pool:
            self._pool.release(slot, 0, self._entries)
        return True

    def store(self, advances: Rows[Advance], rows_RND: Tensor) -> None:
        """Store the activations that a later replay needs."""
        at = 0
        for a in advances:
            self.members[a.sequence_id] = (a.slot, a.start + a.count)
            if a.start == 0 and a.count >= self.taps.sink > 0:
                self._remember_sink(tuple(a.tokens[: self.taps.sink]), rows_RND[at : at + self.taps.sink])
            at += a.count
        self._pending.append((advances, rows_RND))
        self._pending_rows += len(rows_RND)
        if self._pending_rows > MOST_PENDING:
            self._write_tails()

    def _write_tails(self) -> None:
        """Write pending activations to the tails: each sink position has its own entry, the window is a ring."""
        pending, self._pending, self._pending_rows = self._pending, [], 0
        advances = [a for stored, _ in pending for a in stored]
        if not advances or not self.taps.layers:
            return
        rows = [rows_RND for _, rows_RND in pending]
        counts = [a.count for a in advances]
        slots_R = np.repeat([a.slot for a in advances], counts)
        # Rows that have dropped out of the window must not overwrite those in the window. Neither may rows of a
        # sequence that has left: another sequence may have its slot.
        lengths = [self._length_in(a.slot, a.sequence_id) for a in advances]
        ends_R = np.repeat(lengths, counts)
        positions_R = np.concatenate([np.arange(a.start, a.start + a.count) for a in advances])
        sink, window = self.taps.sink, self.taps.window
        for kept_R, entry_R in (
            ((positions_R < sink) & (ends_R >= 0), positions_R),
            ((positions_R >= ends_R - window) & (ends_R >= 0), sink + positions_R % window),
        ):
            _put_rows(self._tails, (slots_R[kept_R], entry_R[kept_R]), rows, kept_R.nonzero()[0])

    def _length_in(self, slot: int, sequence_id: str) -> int:
        """Return the committed length of a sequence; -1 if it has left this slot."""
        now, length = self.members.get(sequence_id, (slot, -1))
        return length if now == slot else -1

    def _remember_sink(self, tokens: tuple[int, ...], rows_SND: Tensor) -> None:
        if self.taps.layers and tokens not in self._sinks:
            if (len(self._sinks) + 1) * len(tokens) > _MOST_REMEMBERED and self._sinks:
                del self._sinks[next(iter(self._sinks))]
            self._sinks[tokens] = rows_SND.clone()

    def knows_sink(self, sequence_id: str) -> bool:
        """Return True if the activations of this sequence's sink need not be computed to copy a prefix."""
        _, length = self.members[sequence_id]
        return length >= self.taps.sink or self._sink_of(sequence_id) in self._sinks

    def _sink_of(self, sequence_id: str) -> tuple[int, ...]:
        return tuple(self._tokens[sequence_id][: self.taps.sink])

    def skip(self, sequence_id: str, length: int) -> None:
        """Continue a sequence at position `length`: those before were copied. If its sink is not known, it leaves."""
        slot, computed = self.members[sequence_id]
        self.members[sequence_id], self._first[sequence_id] = (slot, length), length
        if self.taps.layers and computed < self.taps.sink:
            tokens = self._sink_of(sequence_id)
            if tokens in self._sinks:
                self._pending.append(([Advance(sequence_id, "", slot, 0, list(tokens))], self._sinks[tokens]))
                self._pending_rows += len(tokens)
            else:
                self.leave(sequence_id)

    def pause(self, sequence_ids: Rows[str]) -> None:
        """Send no activations of these sequences, stored ones included, until the sequences are resumed."""
        self._unsent |= {sequence_id: 0 for sequence_id in sequence_ids if sequence_id in self.members}

    def no_rows(self, count: int) -> Tensor:
        """Return the activations [R, 0, D] of `count` positions for a feed without tapped layers."""
        return self._no_row.new_zeros(count, *self._tapped)

    def advance(self, advances: Rows[Advance], rows: Picked) -> Delivery:
        """Return a delivery of the new positions, without sequences that are paused or still have unsent positions."""
        for a in advances:
            if a.paused:
                self._unsent.setdefault(a.sequence_id, a.start)
        told = [a.sequence_id not in self._unsent for a in advances]
        if not any(told):
            return Delivery()
        if not all(told):
            rows = rows.of([a.count for a in advances], told)
            advances = list(compress(advances, told))
        spans = [pb.ActivationSpan(sequence_id=a.sequence_id, start=a.start, count=a.count) for a in advances]
        tokens = [token for a in advances for token in a.tokens] if self.taps.tokens else []
        return Delivery(spans, rows, tokens)

    def catch_up(self, advances: Rows[Advance]) -> Delivery:
        """Return the unsent positions of sequences no longer paused; a replay if not all of them are stored."""
        woken = [a.sequence_id for a in advances if not a.paused and a.sequence_id in self._unsent]
        return self._kept([(sequence_id, self._unsent[sequence_id]) for sequence_id in woken])

    def replay(self, sequence_ids: Rows[str], whole: bool = False) -> Delivery:
        """Return all stored positions of these sequences. The first span of each sequence resets the draft's memory."""
        return self._kept([(sequence_id, 0) for sequence_id in sequence_ids], whole)

    def _kept(self, wanted: Rows[tuple[str, int]], whole: bool = False) -> Delivery:
        """Return activations from `start` on for each (sequence id, start); a replay if some are no longer stored."""
        if wanted:  # empty in most rounds
            self._write_tails()
        spans, rows, tokens = list[pb.ActivationSpan](), list[Tensor](), list[int]()
        sink, window = self.taps.sink, self.taps.window
        for sequence_id, start in wanted:
            slot, length = self.members[sequence_id]
            oldest = 0 if self.taps.tokens else max(self._first.get(sequence_id, 0), length - window)
            reset = not start or start < oldest
            positions = self._kept_positions(sequence_id) if reset else list(range(start, length))
            spans += spans_of(sequence_id, positions, reset)
            entries = [p if p < sink else sink + p % window for p in positions]
            rows.append(self._tails[slot, entries] if self.taps.layers else self.no_rows(len(positions)))
            tokens += [self._tokens[sequence_id][p] for p in positions] if self.taps.tokens else []
            self._unsent.pop(sequence_id, None)
        return Delivery(spans, Picked(torch.cat(rows)) if rows else NO_ROWS, tokens, whole_replay=whole)

    def _kept_positions(self, sequence_id: str) -> list[int]:
        _, length = self.members[sequence_id]
        if self.taps.tokens:
            return list(range(length))
        first = max(self._first.get(sequence_id, 0), length - self.taps.window)
        return [*range(min(self.taps.sink, first)), *range(first, length)]


def _put_rows(to: Tensor, places: tuple[Places, Places], rows: Rows[Tensor], chosen_R: Places) -> None:
    """Write the rows with indices `chosen_R` to `places`, which are (slots, entries) of `to`."""
    if to.device.type == "cpu":
        host_bytes(to)[places] = np.concatenate([host_bytes(each) for each in rows])[chosen_R]
    else:
        slots_R, entries_R, rows_R = (torch.from_numpy(x).to(to.device) for x in (*places, chosen_R))
        to[slots_R, entries_R] = torch.cat(list(rows))[rows_R]
