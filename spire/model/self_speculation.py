"""MagicDec: the target drafts for itself, attending only to the sink and the window of its own cache.

MagicDec needs no training and serves any checkpoint. A round copies sink and window of each sequence to a sparse cache,
a small cache of the same kind as the target's. A pass is a plain step of the target over the sparse cache, by the same
kernels. Nothing is written back: a rejected draft token has no effect, and verification appends the same positions
itself. Within a round the window does not slide: a pass also attends to all tokens drafted before it.

Positions are relative to the sparse cache (Xiao et al., 2024): sink, window and drafted tokens follow each other. The
window's keys are therefore rotated back by the number of positions that the copy leaves out.

Shapes: N layers, B sequences, S copied positions (sink and window), G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.model.backends.reference import Reference
from spire.model.cache.target_cache import TargetCache
from spire.model.layers import rotate
from spire.model.target import Target


class SparseAttention(NamedTuple):
    """The positions before a round that its passes attend to: the first `sink` and the last `window`."""

    sink: int = 1
    window: int = 64


class SelfSpeculation:
    """The target as its own draft, for the sequences in the slots of `cache`. Called by one thread."""

    def __init__(self, target: Target, cache: TargetCache, sparse: SparseAttention, backend: Reference):
        self._target, self._cache, self._backend = target, cache, backend
        self._sink, self._most = sparse.sink, sparse.sink + sparse.window

    @cached_property
    def sparse_cache(self) -> TargetCache:
        """The cache of sink, window and drafted tokens, made at the first round: most verifiers never draft."""
        cache, capacity = self._cache, self._most + MAX_SPECULATION_DEPTH
        return type(cache)(self._target.config, cache.slots, capacity, cache.pools[0][0].dtype, cache.device)

    def round(self, slots: Sequence[int], passing: Callable[[], object] = lambda: None) -> SelfSpeculationRound:
        """Begin a round of up to MAX_SPECULATION_DEPTH passes over B slots, from their committed lengths on.

        Each slot has a committed position. Each pass calls `passing` first. A round ends when the next one begins.
        """
        cache, device = self._cache, self._cache.device
        bases = [cache.lengths[slot] for slot in slots]
        lengths = [min(base, self._most) for base in bases]
        base_B1 = torch.tensor(bases, device=device)[:, None]
        skipped_B1 = (base_B1 - self._most).clamp(min=0)
        entries_S = torch.arange(max(lengths), device=device)
        positions_BS = torch.where(entries_S < self._sink, entries_S, entries_S + skipped_B1)
        # Beyond the end of a shorter sequence, any finite numbers will do.
        keys_NBGSK, values_NBGSK = cache.gather(slots, positions_BS.minimum(base_B1 - 1))
        if max(bases) > self._most:
            keys_NBGSK = self._moved_back(keys_NBGSK, skipped_B1)
        self.sparse_cache.load(lengths, keys_NBGSK, values_NBGSK)
        return SelfSpeculationRound(self._target, self._backend, self.sparse_cache, len(slots), passing)

    def _moved_back(self, keys_NBGSK: Tensor, skipped_B1: Tensor) -> Tensor:
        """Return the keys with those behind the sink rotated to positions that are lower by `skipped_B1`."""
        identity_KK = torch.eye(keys_NBGSK.shape[-1], dtype=keys_NBGSK.dtype, device=keys_NBGSK.device)
        # One rotation serves all keys of a sequence. As a matrix, it reads the keys once.
        rotations_BKK = rotate(identity_KK, self._target.rope(-skipped_B1, keys_NBGSK.dtype))[:, 0]
        moved_NBGSK = (keys_NBGSK.flatten(2, 3) @ rotations_BKK).view_as(keys_NBGSK)
        moved_NBGSK[:, :, :, : self._sink] = keys_NBGSK[:, :, :, : self._sink]
        return moved_NBGSK


class SelfSpeculationRound:
    """A round of passes over the first B slots of a sparse cache. Implements DraftingRound."""

    def __init__(
        self, target: Target, backend: Reference, sparse_cache: TargetCache, B: int, passing: Callable[[], object]
    ):
        self._target, self._backend, self._cache, self._passing = target, backend, sparse_cache, passing
        self._slots = list(range(B))

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Feed the next token of every sequence and return the logits [B, V] of the token after it."""
        self._passing()
        view = self._cache.view(self._slots, 1, decoding=True)
        hidden_B1D = self._backend.forward(self._target, tokens_B[:, None], view).hidden_BTD
        self._cache.commit(self._slots, [1] * len(self._slots))
        self.hidden_BD = hidden_B1D[:, 0]
        return self._target.unembed(self.hidden_BD)
