"""Publishing activations: what entered the tapped layers at committed positions, and a bounded tail of it for replay.

A feed belongs to one draft id. It survives the draft's disconnect, so that a returning draft gets the sink and the
window of every live sequence again. All of it runs on the model thread; delivery is a callable that never blocks.

Shapes: B sequences, T new positions, R rows (positions of all sequences one after the other), N tapped layers, D width.
What it does not know: sequences started before their draft first subscribed. They are decoded plainly.
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
from spire.model.pool import Pool
from spire.rpc.channel import PROTOCOL_VERSION
from spire.rpc.limits import MAX_TAPPED_POSITIONS
from spire.rpc.tensors import host_bytes
from spire.v1 import verifier_pb2 as pb
from verifier_service.delivery import NO_ROWS, Deliver, Delivery, Picked, spans_of

# Positions that wait to be written where a replay looks: together they take hardly longer than a few do.
_MOST_PENDING = 256

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Taps:
    """What a draft wants: counts of layers passed, how many first and last positions it keeps, whether tokens too."""

    layers: tuple[int, ...]
    sink: int
    window: int
    tokens: bool = False

    @classmethod
    def read(cls, request: pb.ActivationsRequest, target: pb.GetInfoResponse) -> Taps:
        """Check a subscription to the activations of `target`. Raises MismatchError naming both values, or
        InvalidRequest."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise MismatchError(
                f"the draft speaks protocol {request.protocol_version}, the verifier {PROTOCOL_VERSION}"
            )
        if request.target_fingerprint != target.target_fingerprint:
            raise MismatchError(
                f"the draft belongs to target {request.target_fingerprint}, "
                f"the verifier serves {target.target_fingerprint}"
            )
        if not request.draft_id or request.window == 0 or bool(request.tapped_layers) == request.tokens:
            raise InvalidRequest(
                "a subscription needs a draft_id, a window of at least 1, and either tapped layers or tokens"
            )
        if (highest := max(request.tapped_layers, default=0)) >= target.num_layers:
            raise InvalidRequest(f"tapped layer {highest} does not exist: the target has {target.num_layers}")
        if len(set(request.tapped_layers)) < len(request.tapped_layers):
            raise InvalidRequest(f"a layer is tapped twice: {list(request.tapped_layers)}")
        # Memory for so many positions is held of every sequence, and none has more than the context.
        sink, window = (min(count, target.max_context) for count in (request.sink, request.window))
        if request.tapped_layers and sink + window > MAX_TAPPED_POSITIONS:
            raise MismatchError(
                f"the draft asks for the activations of {sink + window} positions of every sequence (sink {sink}, "
                f"window {window}), the verifier keeps {MAX_TAPPED_POSITIONS} at most: train one with a smaller window"
            )
        return cls(tuple(request.tapped_layers), sink, window, request.tokens)


@dataclass(slots=True)
class Advance:
    """Positions start .. start + count - 1 of one sequence have been committed, and these tokens stand there.

    Of a `quiet` one the draft need not hear yet.
    """

    sequence_id: str
    draft_id: str
    slot: int
    start: int
    tokens: list[int]
    quiet: bool = False

    @property
    def count(self) -> int:
        return len(self.tokens)


class Feed:
    """One draft's taps, the tails of its sequences, and where to deliver while it is subscribed."""

    def __init__(self, taps: Taps, slots: int, width: int, dtype: torch.dtype, device: torch.device):
        self.taps = taps
        self.deliver: Deliver | None = None
        # sequence id -> (slot, committed length)
        self.members: dict[str, tuple[int, int]] = {}
        # sequence id -> every committed token, where the draft wants them
        self._tokens: dict[str, list[int]] = {}
        # sequence id -> the first position that the draft has not been sent, because it was quiet
        self._unsent: dict[str, int] = {}
        # What is not among the tails yet.
        self._pending: list[tuple[Rows[Advance], Tensor]] = []
        self._pending_rows = 0
        self._entries, self._tapped = taps.sink + taps.window, (len(taps.layers), width)
        # Memory for the tails of all slots, which on a CPU comes with what is written; none while there is no sequence.
        self._pool: Pool | None = None
        self._no_row = torch.zeros(0, *self._tapped, dtype=dtype, device=device)
        self._shape = slots, 1, self._entries, len(taps.layers) * width

    @property
    def _tails(self) -> Tensor:
        """By slot and entry, [slots, sink + window, N, D]."""
        if self._pool is None:
            self._pool = Pool(self._shape, self._no_row.dtype, self._no_row.device)
        return self._pool.tensor.view(-1, self._entries, *self._tapped)

    def join(self, sequence_id: str, slot: int) -> None:
        self.members[sequence_id] = (slot, 0)
        self._tokens[sequence_id] = []

    def leave(self, sequence_id: str) -> bool:
        """Forget a sequence; False when it was none of this feed's."""
        if sequence_id not in self.members:
            return False
        self._write_tails()
        self._tokens.pop(sequence_id, None)
        self._unsent.pop(sequence_id, None)
        slot, _ = self.members.pop(sequence_id)
        if not self.members:
            self._pool = None
        elif self._pool:
            self._pool.release(slot, 0, self._entries)
        return True

    def store(self, advances: Rows[Advance], rows_RND: Tensor) -> None:
        """Keep what a replay will need."""
        for a in advances:
            self.members[a.sequence_id] = (a.slot, a.start + a.count)
            if self.taps.tokens:
                self._tokens[a.sequence_id] += a.tokens
        self._pending.append((advances, rows_RND))
        self._pending_rows += len(rows_RND)
        if self._pending_rows > _MOST_PENDING:
            self._write_tails()

    def _write_tails(self) -> None:
        """Sink positions have entries of their own, the window is a ring."""
        advances = [a for stored, _ in self._pending for a in stored]
        if not advances or not self.taps.layers:
            self._pending, self._pending_rows = [], 0
            return
        rows = [rows_RND for _, rows_RND in self._pending]
        self._pending, self._pending_rows = [], 0
        counts = [a.count for a in advances]
        slots_R = np.repeat([a.slot for a in advances], counts)
        # What is no more in the window, because the sequence has gone on, must not overwrite what is.
        ends_R = np.repeat([self.members[a.sequence_id][1] for a in advances], counts)
        positions_R = np.concatenate([np.arange(a.start, a.start + a.count) for a in advances])
        sink, window = self.taps.sink, self.taps.window
        for kept_R, entry_R in (
            (positions_R < sink, positions_R),
            (positions_R >= ends_R - window, sink + positions_R % window),
        ):
            _put_rows(self._tails, (slots_R[kept_R], entry_R[kept_R]), rows, kept_R.nonzero()[0])

    def skip(self, sequence_id: str, tokens: list[int]) -> None:
        slot, length = self.members[sequence_id]
        self.members[sequence_id] = (slot, length + len(tokens))
        if self.taps.tokens:
            self._tokens[sequence_id] += tokens

    def no_rows(self, count: int) -> Tensor:
        """The activations of `count` positions where no layer is tapped: [R, 0, D]."""
        return self._no_row.new_zeros(count, *self._tapped)

    def advance(self, advances: Rows[Advance], rows: Picked) -> Delivery:
        """What has been committed, but for sequences that are quiet or still have to catch up."""
        for a in advances:
            if a.quiet:
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
        """What sequences that are quiet no more have gained meanwhile; a replay where that is more than is kept."""
        woken = [a.sequence_id for a in advances if not a.quiet and a.sequence_id in self._unsent]
        return self._kept([(sequence_id, self._unsent[sequence_id]) for sequence_id in woken])

    def replay(self, sequence_ids: Rows[str], whole: bool = False) -> Delivery:
        """What is kept of these sequences; the first span of each resets what the draft held."""
        return self._kept([(sequence_id, 0) for sequence_id in sequence_ids], whole)

    def _kept(self, wanted: Rows[tuple[str, int]], whole: bool = False) -> Delivery:
        """Of each sequence the positions from one on, or all that is kept where some of them are not."""
        if wanted:  # nobody is, in most rounds
            self._write_tails()
        spans: list[pb.ActivationSpan] = []
        rows: list[Tensor] = []
        tokens: list[int] = []
        sink, window = self.taps.sink, self.taps.window
        for sequence_id, start in wanted:
            slot, length = self.members[sequence_id]
            oldest = 0 if self.taps.tokens else length - window
            reset = not start or start < oldest
            positions = self._kept_positions(length) if reset else list(range(start, length))
            spans += spans_of(sequence_id, positions, reset)
            entries = [p if p < sink else sink + p % window for p in positions]
            rows.append(self._tails[slot, entries] if self.taps.layers else self.no_rows(len(positions)))
            tokens += [self._tokens[sequence_id][p] for p in positions] if self.taps.tokens else []
            self._unsent.pop(sequence_id, None)
        return Delivery(spans, Picked(torch.cat(rows)) if rows else NO_ROWS, tokens, whole_replay=whole)

    def _kept_positions(self, length: int) -> list[int]:
        if self.taps.tokens:
            return list(range(length))
        first = max(0, length - self.taps.window)
        return [*range(min(self.taps.sink, first)), *range(first, length)]


@dataclass(frozen=True)
class Share:
    """What of a forward's outcome concerns one feed: R positions."""

    feed: Feed
    advances: Rows[Advance]
    rows: Picked


class Publisher:
    """All feeds. The union of their taps is what a forward has to return."""

    # Feeds kept for drafts that may come back.
    MAX_IDLE_FEEDS = 4

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device):
        self._new_feed = lambda taps: Feed(taps, slots, width, dtype, device)
        self._bytes_per_tap = slots * width * dtype.itemsize
        self.feeds: dict[str, Feed] = {}
        self.bytes_published = 0
        self.replays = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for feed in self.feeds.values() for layer in feed.taps.layers}))

    def replay_bytes(self, taps: Taps) -> int:
        """The largest replay such a draft can be sent. Any thread may ask."""
        return self._bytes_per_tap * (taps.sink + taps.window) * len(taps.layers)

    def subscribe(self, draft_id: str, taps: Taps, deliver: Deliver) -> None:
        """Deliver to this subscriber from now on, beginning with a replay. The former one gets nothing more."""
        feed = self.feeds.get(draft_id)
        if feed is None or feed.taps != taps:
            feed = self.feeds[draft_id] = self._new_feed(taps)
        feed.deliver = deliver
        self._drop_idle_feeds()
        self.replay_all(draft_id, deliver)

    def unsubscribe(self, draft_id: str, deliver: Deliver) -> None:
        feed = self.feeds.get(draft_id)
        if feed is not None and feed.deliver == deliver:
            feed.deliver = None

    def _drop_idle_feeds(self) -> None:
        """Those whose sequences would be missed go last."""
        idle = [draft_id for draft_id, feed in self.feeds.items() if feed.deliver is None]
        idle.sort(key=lambda draft_id: bool(self.feeds[draft_id].members))
        for draft_id in idle[: -self.MAX_IDLE_FEEDS or None]:
            del self.feeds[draft_id]

    def join(self, sequence_id: str, draft_id: str, slot: int) -> None:
        """A sequence begins; its tail is kept if its draft has ever subscribed."""
        if feed := self.feeds.get(draft_id):
            feed.join(sequence_id, slot)

    def replayed(self, draft_id: str) -> tuple[int, int]:
        """The first and last positions whose activations this draft is sent again after a loss."""
        feed = self.feeds.get(draft_id)
        return (feed.taps.sink, feed.taps.window) if feed and feed.taps.layers else (0, 0)

    def skip(self, sequence_id: str, draft_id: str, tokens: list[int]) -> None:
        """The next positions of this sequence come from elsewhere: no forward will bring their activations."""
        if (feed := self.feeds.get(draft_id)) and sequence_id in feed.members:
            feed.skip(sequence_id, tokens)

    def shares(self, advances: Rows[Advance], taps_BTND: Tensor | None) -> list[Share]:
        """What of a forward's outcome concerns each feed. `advances` has one entry per row of `taps`, with count 0
        where nothing was committed."""
        layers, shares = self.layers, []
        for draft_id, feed in self.feeds.items():
            mine = [
                row
                for row, a in enumerate(advances)
                if a.draft_id == draft_id and a.count and a.sequence_id in feed.members
            ]
            if not mine:
                continue
            chosen = [advances[row] for row in mine]
            if taps_BTND is None:
                rows = Picked(feed.no_rows(sum(a.count for a in chosen)))
            elif feed.taps.layers == layers:
                rows = _committed(taps_BTND, mine, chosen)
            else:
                wanted = [layers.index(layer) for layer in feed.taps.layers]
                rows = _committed(taps_BTND[:, :, wanted], mine, chosen)
            shares.append(Share(feed, chosen, rows))
        return shares

    def announce(self, shares: Rows[Share]) -> None:
        """Tell the drafts, which wait for it."""
        for share in shares:
            if share.feed.deliver:
                self._deliver(share.feed.deliver, share.feed.advance(share.advances, share.rows))

    def store(self, shares: Rows[Share]) -> None:
        """Keep what a later replay needs, while the drafts read; then tell of who is quiet no more."""
        for share in shares:
            share.feed.store(share.advances, share.rows.rows_RND)
            if share.feed.deliver:
                self._deliver(share.feed.deliver, share.feed.catch_up(share.advances))

    def replay(self, draft_id: str, sequence_ids: Rows[str]) -> None:
        """Send sink and window of these sequences again, as far as they are held."""
        feed = self.feeds.get(draft_id)
        if feed is None or feed.deliver is None:
            return
        known = [i for i in sequence_ids if feed.members.get(i, (0, 0))[1]]
        if known:
            self.replays += len(known)
            self._deliver(feed.deliver, feed.replay(known))

    def unknown(self, draft_id: str, sequence_ids: Rows[str]) -> list[str]:
        """Those of which no tail is kept for this draft."""
        feed = self.feeds.get(draft_id)
        return [i for i in sequence_ids if feed is None or i not in feed.members]

    def replay_all(self, draft_id: str, deliver: Deliver) -> None:
        """Everything from the beginning, for a subscriber that is new or was too slow."""
        feed = self.feeds.get(draft_id)
        if feed is not None and feed.deliver == deliver:
            known = [i for i, (_, length) in feed.members.items() if length]
            self.replays += len(known)
            self._deliver(deliver, feed.replay(known, whole=True))

    def end(self, sequence_ids: Rows[str]) -> None:
        """These sequences are over: their tails are free, their drafts are told."""
        for feed in self.feeds.values():
            ended = [i for i in sequence_ids if feed.leave(i)]
            if ended and feed.deliver:
                self._deliver(feed.deliver, Delivery(ended=ended))

    def _deliver(self, deliver: Deliver, delivery: Delivery) -> None:
        if delivery.spans or delivery.ended or delivery.whole_replay:
            self.bytes_published += delivery.rows.nbytes
            deliver(delivery)


def _put_rows(to: Tensor, places: tuple[Places, Places], rows: Rows[Tensor], chosen_R: Places) -> None:
    """Write the chosen of all these rows to two-dimensional places."""
    if to.device.type == "cpu":
        host_bytes(to)[places] = np.concatenate([host_bytes(each) for each in rows])[chosen_R]
    else:
        slots_R, entries_R, rows_R = (torch.from_numpy(x).to(to.device) for x in (*places, chosen_R))
        to[slots_R, entries_R] = torch.cat(list(rows))[rows_R]


def _committed(taps_BTND: Tensor, rows: list[int], advances: Rows[Advance]) -> Picked:
    """The committed positions of the chosen rows, one after the other."""
    T, taps_XND = taps_BTND.shape[1], taps_BTND.flatten(0, 1)
    if sum(a.count for a in advances) == len(taps_XND):
        return Picked(taps_XND)
    return Picked(taps_XND, [row * T + at for row, a in zip(rows, advances, strict=True) for at in range(a.count)])
