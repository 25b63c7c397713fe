"""A SPIRe draft's memory while serving: the number of key/value pairs per sequence is constant, for any context length.

A slot stores the sink and a ring of the last `window` verified positions. The k positions of a round are stored in a
working copy and are dropped when the round ends. A rejected token can therefore never evict a committed one, and no
rollback is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spire.decoding.drafting import DraftingRound
from spire.model.draft import Draft, visible
from spire.model.layers import additive, attend


class DraftMemory:
    """A draft's keys and values [N, slots, G, sink + window, K], and the text position of each entry, -1 if empty."""

    def __init__(self, draft: Draft, slots: int):
        config, spire = draft.config, draft.draft
        weight = draft.embed_tokens.weight
        places = spire.sink + spire.window
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, places, config.head_dim)
        self.draft, self.places, self.slots = draft, places, slots
        self.keys_NXGSK = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values_NXGSK = torch.zeros_like(self.keys_NXGSK)
        self.positions_XS = torch.full((slots, places), -1, dtype=torch.int64, device=weight.device)

    def bytes_per_sequence(self) -> int:
        """Return the bytes of one slot, the same for every sequence."""
        pairs = self.keys_NXGSK[:, 0].numel() * self.keys_NXGSK.element_size() * 2
        return pairs + self.places * self.positions_XS.element_size()

    def forget(self, slot: int) -> None:
        self.positions_XS[slot] = -1

    def absorb(self, slots_R: Tensor, positions_R: Tensor, taps_RND: Tensor) -> None:
        """Store keys and values computed from the target's activations at R verified positions, in any order.

        Of each slot, the positions must lie in the sink or in one window, because a place holds one position.
        """
        sink, window = self.draft.draft.sink, self.draft.draft.window
        places_R = torch.where(positions_R < sink, positions_R, sink + (positions_R - sink) % window)
        self.positions_XS[slots_R, places_R] = positions_R
        for layer, (keys, values) in enumerate(self.draft.remembered(taps_RND[None], positions_R[None])):
            self.keys_NXGSK[layer][slots_R, :, places_R] = keys[0].transpose(0, 1)
            self.values_NXGSK[layer][slots_R, :, places_R] = values[0].transpose(0, 1)

    def round(self, slots: Sequence[int], bases: Sequence[int], k: int) -> DraftingRound:
        """Begin a drafting round of k passes over `slots`, whose newest tokens are at positions `bases`."""
        device = self.positions_XS.device
        return RoundMemory(self, torch.tensor(slots, device=device), torch.tensor(bases, device=device), k)


class RoundMemory:
    """A working copy of a draft's memory for one round of k passes, N times [B, G, sink + window + k, K]."""

    def __init__(self, memory: DraftMemory, slots_B: Tensor, base_B: Tensor, k: int):
        self.draft, self.places = memory.draft, memory.places
        self.positions_BK = base_B[:, None] + torch.arange(k, device=base_B.device)
        held_BS = torch.cat((memory.positions_XS[slots_B], self.positions_BK), dim=1)
        self.keys = _with_scratch(memory.keys_NXGSK, slots_B, k)
        self.values = _with_scratch(memory.values_NXGSK, slots_B, k)
        self.masks_B1KS = additive(visible(self.positions_BK, held_BS, memory.draft.draft), self.keys[0].dtype)
        self.mask: Tensor | None = None
        self.passes = -1

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Feed the next token of every sequence and return the logits [B, V] of the token after it."""
        self.passes += 1
        now = slice(self.passes, self.passes + 1)
        self.positions_BT, self.mask = self.positions_BK[:, now], self.masks_B1KS[:, :, now]
        hidden_B1D = self.draft(tokens_B[:, None], self)
        self.hidden_BD = hidden_B1D[:, 0]
        return self.draft.unembed(hidden_B1D)[:, 0]

    @property
    def passes_follow(self) -> bool:
        return self.passes + 1 < self.positions_BK.shape[1]

    def attend(self, layer: int, queries_BHTK: Tensor, keys_BGTK: Tensor, values_BGTK: Tensor) -> Tensor:
        self.replace(layer, keys_BGTK, values_BGTK)
        return attend(queries_BHTK, self.keys[layer], self.values[layer], self.mask)

    def replace(self, layer: int, keys_BGTK: Tensor, values_BGTK: Tensor) -> None:
        place = self.places + self.passes
        self.keys[layer].narrow(2, place, 1).copy_(keys_BGTK)
        self.values[layer].narrow(2, place, 1).copy_(values_BGTK)


def _with_scratch(pool_NXGSK: Tensor, slots_B: Tensor, k: int) -> tuple[Tensor, ...]:
    """Copy the slots and add k zero entries, by layer. `index_select` is far faster than indexing after a slice."""
    N, _, G, S, K = pool_NXGSK.shape
    pairs_NBGSK = pool_NXGSK.new_empty(N, len(slots_B), G, S + k, K)
    torch.index_select(pool_NXGSK, 1, slots_B, out=pairs_NBGSK[:, :, :, :S])
    pairs_NBGSK[:, :, :, S:] = 0  # masked, but a stray NaN would still spread
    return pairs_NBGSK.unbind()
