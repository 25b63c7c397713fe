"""Publishing activations: the inputs of the tapped layers at committed positions, and a bounded tail kept for replay.

A feed belongs to one draft id. A feed survives the draft's disconnect, so that a returning draft gets the sink and the
window of every live sequence again. Everything runs on the model thread; `deliver` never waits for a draft.

Shapes: B sequences, T new positions, R rows (positions of all sequences one after the other), N tapped layers, D width.
Does not know: sequences that started before their draft first subscribed. They are decoded plainly.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from verifier_service.feed import feed as feeds
from verifier_service.feed.delivery import Deliver, Delivery, Picked
from verifier_service.feed.feed import Advance, Feed, Taps
from verifier_service.metrics import VerifierMetrics


class FeedRows(NamedTuple):
    """The committed positions of a forward that belong to one feed, and the activations at these R positions."""

    feed: Feed
    advances: Rows[Advance]
    rows: Picked


class Publisher:
    """The feeds of all drafts. Every forward must return the activations of all layers in `layers`."""

    # The most feeds kept for disconnected drafts, which may come back.
    MAX_IDLE_FEEDS = 4

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device, metrics: VerifierMetrics):
        self._new_feed = lambda taps: Feed(taps, slots, width, dtype, device)
        self._bytes_per_tap = slots * width * dtype.itemsize
        self._metrics = metrics
        self.feeds: dict[str, Feed] = {}
        # Rounds in which all sequences were paused. No draft waits for them, and many at once take far less time.
        self._later: list[tuple[Rows[Advance], Tensor | None]] = []
        self._later_rows = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for feed in self.feeds.values() for layer in feed.taps.layers}))

    def replay_bytes(self, taps: Taps) -> int:
        """Return the size, in bytes, of the largest replay for a draft with these taps. Any thread may call this."""
        return self._bytes_per_tap * (taps.sink + taps.window) * len(taps.layers)

    def subscribe(self, draft_id: str, taps: Taps, deliver: Deliver) -> None:
        """Pass the draft's deliveries to `deliver` from now on, first a replay. Older subscribers get no deliveries."""
        self._keep_later()
        feed = self.feeds.get(draft_id)
        if feed is None or feed.taps != taps:
            feed = self.feeds[draft_id] = self._new_feed(taps)
        feed.deliver = deliver
        # Drop idle feeds above the limit, those without sequences first.
        idle = [other for other, feed in self.feeds.items() if feed.deliver is None]
        idle.sort(key=lambda other: bool(self.feeds[other].members))
        for other in idle[: -self.MAX_IDLE_FEEDS or None]:
            del self.feeds[other]
        self.replay_all(draft_id, deliver)

    def unsubscribe(self, draft_id: str, deliver: Deliver) -> None:
        feed = self.feeds.get(draft_id)
        if feed is not None and feed.deliver == deliver:
            feed.deliver = None

    def join(self, sequence_id: str, draft_id: str, slot: int, tokens: list[int]) -> None:
        """Add a sequence to the feed of its draft, if there is a feed. The list `tokens` grows with the sequence."""
        if feed := self.feeds.get(draft_id):
            feed.join(sequence_id, slot, tokens)

    def needed(self, sequence_id: str, draft_id: str) -> tuple[int, int]:
        """Return how many of a sequence's first and last positions must be computed even if they could be copied.

        Its draft needs their activations.
        """
        feed = self.feeds.get(draft_id)
        if feed is None or not feed.taps.layers or sequence_id not in feed.members:
            return 0, 0
        sink = 0 if feed.knows_sink(sequence_id) else feed.taps.sink
        return sink, min(feed.taps.window, feeds.LEAST_COMPUTED)

    def skip(self, sequence_id: str, draft_id: str, length: int) -> None:
        """Continue a sequence at position `length`: those before were copied, no forward computes their activations."""
        self._keep_later()
        if (feed := self.feeds.get(draft_id)) and sequence_id in feed.members:
            feed.skip(sequence_id, length)

    def shares(self, advances: Rows[Advance], taps_BTND: Tensor | None) -> list[FeedRows]:
        """Split a forward's activations by draft. `advances` has one entry per row of `taps_BTND`, with count 0 if
        nothing was committed. A round without draft tokens is deferred (empty result) if all sequences are paused."""
        if self.feeds and all(a.paused for a in advances) and (taps_BTND is None or taps_BTND.shape[1] == 1):
            self._later.append((advances, taps_BTND))
            self._later_rows += len(advances)
            if self._later_rows > feeds.MOST_PENDING:
                self._keep_later()
            return []
        self._keep_later()
        return self._shares(advances, taps_BTND)

    def _keep_later(self) -> None:
        """Deliver and store the activations of the deferred rounds."""
        if not self._later:
            return
        advances = [a for later, _ in self._later for a in later]
        taps = [taps_BTND for _, taps_BTND in self._later if taps_BTND is not None]
        self._later, self._later_rows = [], 0
        shares = self._shares(advances, torch.cat(taps) if taps else None)
        self.announce(shares)
        self.store(shares)

    def _shares(self, advances: Rows[Advance], taps_BTND: Tensor | None) -> list[FeedRows]:
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
            shares.append(FeedRows(feed, chosen, rows))
        return shares

    def announce(self, shares: Rows[FeedRows]) -> None:
        """Deliver the activations of committed positions to the drafts, which wait for them."""
        for share in shares:
            if share.feed.deliver:
                self._deliver(share.feed.deliver, share.feed.advance(share.advances, share.rows))

    def store(self, shares: Rows[FeedRows]) -> None:
        """Store the activations that a later replay needs; then deliver the unsent ones of resumed sequences."""
        for share in shares:
            share.feed.store(share.advances, share.rows.rows_RND)
            if share.feed.deliver:
                self._deliver(share.feed.deliver, share.feed.catch_up(share.advances))

    def replay(self, draft_id: str, sequence_ids: Rows[str]) -> None:
        """Replay these sequences to their draft if it is subscribed; skip sequences without stored positions."""
        self._keep_later()
        feed = self.feeds.get(draft_id)
        if feed is None or feed.deliver is None:
            return
        known = [i for i in sequence_ids if feed.members.get(i, (0, 0))[1]]
        if known:
            self._metrics.replays.inc(len(known))
            self._deliver(feed.deliver, feed.replay(known))

    def pause(self, draft_id: str, sequence_ids: Rows[str]) -> None:
        """Stop sending activations of these sequences to the draft, until a block of the sequence is not paused."""
        self._keep_later()
        if feed := self.feeds.get(draft_id):
            feed.pause(sequence_ids)

    def replay_all(self, draft_id: str, deliver: Deliver) -> None:
        """Send all stored activations of a draft's sequences to its subscriber, which is new or was too slow."""
        self._keep_later()
        feed = self.feeds.get(draft_id)
        if feed is not None and feed.deliver == deliver:
            known = [i for i, (_, length) in feed.members.items() if length]
            self._metrics.replays.inc(len(known))
            self._deliver(deliver, feed.replay(known, whole=True))

    def end(self, sequence_ids: Rows[str]) -> None:
        """Free the stored activations of ended sequences, and notify their drafts."""
        self._keep_later()
        for feed in self.feeds.values():
            ended = [i for i in sequence_ids if feed.leave(i)]
            if ended and feed.deliver:
                self._deliver(feed.deliver, Delivery(ended=ended))

    def _deliver(self, deliver: Deliver, delivery: Delivery) -> None:
        if delivery.spans or delivery.ended or delivery.whole_replay:
            self._metrics.activation_bytes.inc(delivery.rows.nbytes)
            deliver(delivery)


def _committed(taps_BTND: Tensor, rows: list[int], advances: Rows[Advance]) -> Picked:
    """Select the activations at the committed positions of these rows, concatenated row by row."""
    T, taps_XND = taps_BTND.shape[1], taps_BTND.flatten(0, 1)
    if sum(a.count for a in advances) == len(taps_XND):
        return Picked(taps_XND)
    return Picked(taps_XND, [row * T + at for row, a in zip(rows, advances, strict=True) for at in range(a.count)])
