"""MagicDec: the target drafts for itself, attending only to the sink and the window of its own cache.

MagicDec needs no training and serves any checkpoint. A pass is the target's own forward over a sparse copy of its
cache, which is made once per round and never written back: a rejected draft token has no effect, and verification
appends the same positions itself.

Positions are relative to the sparse cache (Xiao et al., 2024): the window has its positions in the text, and the sink
directly precedes the window. Rotations compose, so the sink's few keys are rotated forward instead of every query.

Shapes: N layers, B sequences, S entries (sink, window, then k drafted), G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spire.model.cache.target_cache import TargetCache
from spire.model.draft import SparseAttention, visible
from spire.model.layers import additive, attend, rotate
from spire.model.target import Target


class SelfSpeculation:
    """A MagicDec round: k <= window passes over B slots, from their committed lengths on. Implements KeyValues."""

    positions_BT: Tensor
    fused: Sequence[Any] = ()

    def __init__(self, target: Target, cache: TargetCache, slots: Sequence[int], k: int, sparse: SparseAttention):
        device = cache.device
        base_B1 = torch.tensor([cache.lengths[slot] for slot in slots], device=device)[:, None]
        self._target, self._sparse = target, sparse
        self._positions_BK = base_B1 + torch.arange(k, device=device)
        # The text position of each entry, -1 if empty. A sink position inside the window is stored once.
        sink_S = torch.arange(sparse.sink, device=device)
        window_BS = base_B1 - sparse.window + torch.arange(sparse.window, device=device)
        held = (torch.where(sink_S < base_B1, sink_S, -1), torch.where(window_BS >= sparse.sink, window_BS, -1))
        held_BS = torch.cat((*held, self._positions_BK), dim=1)
        # Empty entries and entries of draft tokens are filled with finite numbers: a masked NaN would still spread.
        committed_BS = torch.where(held_BS < base_B1, held_BS, 0).clamp(min=0)
        self._keys_NBGSK, self._values_NBGSK = cache.gather(slots, committed_BS)
        self._sinks_NBGSK = self._keys_NBGSK[:, :, :, : sparse.sink].clone()
        self._masks_B1KS = additive(visible(self._positions_BK, held_BS, sparse), self._keys_NBGSK.dtype)
        self._passes = -1

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Feed the next token of every sequence and return the logits [B, V] of the token after it."""
        self._passes += 1
        now = slice(self._passes, self._passes + 1)
        self.positions_BT, self._mask = self._positions_BK[:, now], self._masks_B1KS[:, :, now]
        self._move_sinks()
        return self._target.unembed(self._target(tokens_B[:, None], self).hidden_BTD)[:, 0]

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        """Store new keys and values; return attention to sink, window and the round's positions, [B, H, T, K]."""
        place = self._sparse.sink + self._sparse.window + self._passes
        for places, new in ((self._keys_NBGSK, keys_BGTK), (self._values_NBGSK, values_BGTK)):
            places[layer][:, :, place : place + 1] = new
        return attend(queries_BHTK, self._keys_NBGSK[layer], self._values_NBGSK[layer], self._mask)

    def _move_sinks(self) -> None:
        """Rotate the sink's keys by the number of positions between sink and window, so that the two are adjacent."""
        unseen_BT = (self.positions_BT - self._sparse.sink - self._sparse.window).clamp(min=0)
        rope = self._target.rope(unseen_BT, self._sinks_NBGSK.dtype)
        self._keys_NBGSK[:, :, :, : self._sparse.sink] = rotate(self._sinks_NBGSK, rope)
