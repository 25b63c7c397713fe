"""Attention over slots that are contiguous each, by the CPU's flash kernel: bfloat16 on a CPU.

Neighbours of about the same length are one call, which reads each of them as far as the longest reaches. Nothing is
gathered or copied, and each key and value byte is read once.

Shapes: B sequences, H query heads, T new positions, G key/value heads, K head width, L positions of a slot, S columns
of a mask, R = H / G * T queries of each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

# Positions that may be read in vain to save a call, which takes as long to begin as to read so many; and how many
# queries times positions where there are many queries.
_CALL, _MOST = 256, 4096
# Positions are read by so many: sums then come in an order that does not depend on how far a neighbour reaches.
_STEP = 64


class ContiguousAttention:
    """What new positions of some slots find in the first `needed` positions of theirs."""

    def __init__(
        self, slots: Sequence[int], needed: Sequence[int], longest: int, new_tokens: int, queries_per_key: int
    ):
        """`longest`: positions of a slot."""
        self._order = sorted(range(len(slots)), key=slots.__getitem__)
        self._in_order = self._order == sorted(self._order)
        self._back = sorted(range(len(slots)), key=self._order.__getitem__)
        read = [min(longest, -(-positions // _STEP) * _STEP) for positions in needed]
        self._runs = _runs([(slots[row], read[row]) for row in self._order], min(_CALL, _MOST // new_tokens))
        self._queries_per_key = queries_per_key
        self.columns = max(read)

    def see(self, mask_BTS: Tensor) -> None:
        """Add this to scores of the last S columns; all see those before."""
        mask_BTS = mask_BTS if self._in_order else mask_BTS[self._order]
        mask_BRS = pad(mask_BTS, (self.columns - mask_BTS.shape[2], 0)).repeat(1, self._queries_per_key, 1)
        self._masks = [mask_BRS[run.rows, None, :, : run.positions] for run in self._runs]

    def attend(self, queries_BHTK: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What was found in these pools [slots, G, L, K]: [B, H, T, K]."""
        queries_BHTK = queries_BHTK if self._in_order else queries_BHTK[self._order]
        queries_BGRK = queries_BHTK.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        found = [
            scaled_dot_product_attention(queries_BGRK[run.rows], run.of(keys), run.of(values), mask)
            for run, mask in zip(self._runs, self._masks, strict=True)
        ]
        found_BGRK = found[0] if len(found) == 1 else torch.cat(found)
        found_BHTK = found_BGRK.reshape(queries_BHTK.shape)
        return found_BHTK if self._in_order else found_BHTK[self._back]


@dataclass(frozen=True)
class _Run:
    """`positions` of the slots from `first` on, which stand in these rows."""

    first: int
    positions: int
    rows: slice

    def of(self, pool: Tensor) -> Tensor:
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
