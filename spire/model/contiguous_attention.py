"""Attention over slots that are contiguous each, by torch's flash kernel for CPUs.

Neighbours of about the same length are one call, which reads each of them as far as the longest reaches. Nothing is
gathered or copied, and each key and value byte is read once.

Shapes: B sequences, G key/value heads, K head width, L positions of a slot, S columns of a mask, R queries of each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

# Positions that may be read in vain to save a call, which takes as long to begin as to read so many; and how many
# queries times positions where there are many queries.
_CALL, _MOST = 256, 4096
# Positions are read by so many: sums then come in an order that does not depend on how far a neighbour reaches.
_STEP = 64


class ContiguousAttention:
    """What new positions of some slots find in the first `needed` positions of theirs, of which there are `longest`.

    Rows come and go in `order`, by which slots ascend.
    """

    def __init__(self, slots: Sequence[int], needed: Sequence[int], longest: int, new_tokens: int):
        self.order = sorted(range(len(slots)), key=slots.__getitem__)
        read = [min(longest, -(-positions // _STEP) * _STEP) for positions in needed]
        self._runs = _runs([(slots[row], read[row]) for row in self.order], min(_CALL, _MOST // new_tokens))
        self.columns = max(read)

    def see(self, mask_BRS: Tensor) -> None:
        """Add this to scores of the last S columns; all see those before."""
        mask_BRS = pad(mask_BRS, (self.columns - mask_BRS.shape[2], 0))
        self._masks = [mask_BRS[run.rows, None, :, : run.positions] for run in self._runs]

    def attend(self, queries_BGRK: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """What was found in these pools, [slots, G, L, K], as parts of [B, G, R, K]."""
        return [
            scaled_dot_product_attention(queries_BGRK[run.rows], run.of(keys), run.of(values), mask)
            for run, mask in zip(self._runs, self._masks, strict=True)
        ]


@dataclass(frozen=True)
class _Run:
    """`positions` of the slots from `first` on, which stand in these rows."""

    first: int
    positions: int
    rows: slice

    def of(self, pool: Tensor) -> Tensor:
        """[slots, G, positions, K]."""
        return pool[self.first : self.first + self.rows.stop - self.rows.start, :, : self.positions]


def _runs(needs: Sequence[tuple[int, int]], in_vain: int) -> list[_Run]:
    """Ascending slots and what they need, as runs of neighbours; each spares a call by reading so much `in_vain`."""
    runs: list[_Run] = []
    for row, (slot, needed) in enumerate(needs):
        if runs:
            last = runs[-1]
            held = last.rows.stop - last.rows.start
            more = abs(needed - last.positions) * (held if needed > last.positions else 1)
            if slot == last.first + held and more <= in_vain:
                positions = max(needed, last.positions)
                runs[-1] = _Run(last.first, positions, slice(last.rows.start, row + 1))
                continue
        runs.append(_Run(slot, needed, slice(row, row + 1)))
    return runs
