"""Deliveries to a draft: rows of activations, the spans that they belong to, and the sequences that have ended.

Does not know: how a delivery reaches the draft, or what is kept for a replay.

Shapes: X source rows, R rows (positions of all sequences one after the other), N tapped layers, D width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence as Rows
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress, pairwise

import torch
from torch import Tensor

from spire.rpc.tensors import copy_to, host_bytes
from spire.v1 import draft_pb2 as pb

_TOKEN_BYTES = 5  # the longest varint of a token


@dataclass(frozen=True)
class Picked:
    """R rows of a tensor [X, N, D]: the rows with indices `places`, or all if None. Gathered only when needed."""

    from_XND: Tensor
    places: list[int] | None = None

    def __len__(self) -> int:
        return len(self.from_XND) if self.places is None else len(self.places)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.from_XND.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.from_XND.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.from_XND.itemsize

    def of(self, counts: Rows[int], kept: Rows[bool]) -> Picked:
        """Select groups of consecutive rows: `counts` has each group's size, `kept` is True for groups to select."""
        places = range(len(self.from_XND)) if self.places is None else self.places
        bounds = compress(pairwise(accumulate(counts, initial=0)), kept)
        return Picked(self.from_XND, [place for at, end in bounds for place in places[at:end]])

    @cached_property
    def rows_RND(self) -> Tensor:
        """The rows as a tensor [R, N, D] on the same device."""
        if self.places is None:
            return self.from_XND
        gathered_RND = self.from_XND.new_empty(self.shape)
        self.gather(gathered_RND)
        return gathered_RND

    def gather(self, to_RND: Tensor) -> None:
        """Copy the rows to `to_RND`, which is contiguous memory on the same device or on the host."""
        device = self.from_XND.device
        if self.places is None:
            copy_to(to_RND, self.from_XND)
        elif device.type == "cpu":
            # Every index is valid. With mode "raise", numpy would gather into a buffer first.
            host_bytes(self.from_XND.flatten(1)).take(self.places, 0, host_bytes(to_RND.flatten(1)), "clip")
        else:
            places_R = torch.tensor(self.places, device=device)
            if to_RND.device == device:
                torch.index_select(self.from_XND, 0, places_R, out=to_RND)
            else:
                copy_to(to_RND, self.from_XND[places_R])


NO_ROWS = Picked(torch.empty(0, 0, 0))


@dataclass(frozen=True)
class Delivery:
    """One delivery to a draft: activations of R positions in the order of the spans, or the ids of ended sequences.

    A whole replay replaces every delivery that has not been sent yet. `tokens` has R entries, or none.
    """

    spans: Rows[pb.ActivationSpan] = ()
    rows: Picked = NO_ROWS
    tokens: Rows[int] = ()
    ended: Rows[str] = ()
    whole_replay: bool = False


Deliver = Callable[[Delivery], None]


def spans_of(sequence_id: str, positions: list[int], reset: bool) -> list[pb.ActivationSpan]:
    """Return one span per run of consecutive positions. If `reset`, the first span marks the start of a replay."""
    starts = [at for at, position in enumerate(positions) if at == 0 or position != positions[at - 1] + 1]
    return [
        pb.ActivationSpan(sequence_id=sequence_id, start=positions[a], count=b - a, reset=reset and a == 0)
        for a, b in pairwise([*starts, len(positions)])
    ]


def frames(delivery: Delivery, max_bytes: int) -> Iterator[Delivery]:
    """Split a delivery into parts of at most `max_bytes`, but at least one position each. Spans may be split too."""
    rows = delivery.rows
    if not len(rows):
        return
    limit = max(1, max_bytes // (rows.nbytes // len(rows) + _TOKEN_BYTES))
    if len(rows) <= limit:
        yield delivery
        return
    parts = defaultdict[int, list[pb.ActivationSpan]](list)
    at = 0
    for span in delivery.spans:
        done = 0
        while done < span.count:
            count = min(limit - at % limit, span.count - done)
            reset = span.reset and done == 0
            parts[at // limit].append(
                pb.ActivationSpan(sequence_id=span.sequence_id, start=span.start + done, count=count, reset=reset)
            )
            done, at = done + count, at + count
    for number, spans in parts.items():
        stretch = slice(number * limit, (number + 1) * limit)
        yield Delivery(spans, Picked(rows.rows_RND[stretch]), delivery.tokens[stretch])
