"""The KV cache of a draft that receives tokens instead of the target's activations.

Used by a vanilla draft, and by SPIRe's ablation without target activations. The cache grows with the context, up to the
target's capacity. Keys and values of draft tokens are kept, so that accepted draft tokens need not be fed again.

Shapes: B sequences, T positions, V vocabulary, G key/value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.errors import OutOfCapacity
from spire.model.cache.placed import cache_for
from spire.model.draft import Draft, visible

# Positions of a prompt per forward.
_CHUNK = 512


class TokenMemory:
    """A draft's KV cache with slots of `capacity` positions. Each slot has a list of verified and one of fed tokens.

    `budget` is the size of the cache in bytes; None: as much as all slots need.
    """

    def __init__(self, draft: Draft, slots: int, capacity: int, budget: int | None = None):
        weight, most = draft.embed_tokens.weight, capacity + MAX_SPECULATION_DEPTH
        self.draft, self.slots = draft, slots
        self.cache = cache_for(draft.config, slots, most, weight.dtype, weight.device, budget=budget)
        # Kernels can attend if each position sees all positions before it.
        self._dense = draft.draft.attends_self and draft.draft.window >= capacity
        self.verified: list[list[int]] = [[] for _ in range(slots)]
        self.fed: list[list[int]] = [[] for _ in range(slots)]

    def bytes_per_sequence(self) -> int:
        """Return the bytes of one slot of the KV cache, which has room for the longest sequence."""
        return self.cache.bytes // self.slots

    def forget(self, slot: int) -> None:
        self.verified[slot], self.fed[slot] = [], []
        self.cache.empty(slot)

    def absorb(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Store a slot's verified tokens from position `start` on; feed those not yet cached, except the last.

        Raises OutOfCapacity if there is no memory for these positions and a round behind them: it fails no round.
        """
        verified = self.verified[slot]
        verified[start:] = tokens
        fed = self.fed[slot]
        right = takewhile(lambda pair: pair[0] == pair[1], zip(fed[start:], tokens, strict=False))
        del fed[start + len(list(right)) :]
        self.cache.rewind([slot], [len(fed)])
        if not self.cache.reserve([slot], len(verified) + MAX_SPECULATION_DEPTH - len(fed)):
            raise OutOfCapacity(f"no memory for {len(verified)} positions and a round")
        # A round feeds the last verified position together with the newest token.
        while len(fed) < len(verified) - 1:
            chunk = verified[len(fed) : min(len(fed) + _CHUNK, len(verified) - 1)]
            self._append([slot], [len(fed)], torch.tensor([chunk], device=self.cache.device))
            fed += chunk

    def round(self, slots: Sequence[int], bases: Sequence[int], k: int) -> TokenRound:
        """Begin a drafting round over `slots`, whose newest tokens are at positions `bases`; any k fits the cache."""
        return TokenRound(self, slots, bases)

    def _append(self, slots: Sequence[int], starts: Sequence[int], tokens_BT: Tensor) -> Tensor:
        """Feed T tokens per slot from positions `starts` on; return hidden [B, T, D]. Ascending slots are faster."""
        self.cache.rewind(slots, starts)
        T = tokens_BT.shape[1]
        view = self.cache.view(slots, T, decoding=T <= 2, causal=self._dense)
        if not self._dense:
            view.see(visible(view.positions_BT, view.columns_1S, self.draft.draft))
        hidden_BTD = self.draft(tokens_BT, view)
        self.cache.commit(slots, [T] * len(slots))
        return hidden_BTD


class TokenRound:
    """A drafting round: the first pass feeds the last two tokens, each later pass the previous draft token."""

    def __init__(self, memory: TokenMemory, slots: Sequence[int], bases: Sequence[int]):
        self._memory = memory
        self._device = memory.cache.device
        order = sorted(range(len(slots)), key=lambda row: slots[row])
        self._slots = [slots[row] for row in order]
        self._starts = [bases[row] - 1 for row in order]
        self._order_B = torch.tensor(order, device=self._device)
        self._back_B = torch.argsort(self._order_B)
        last = [memory.verified[slot][start] for slot, start in zip(self._slots, self._starts, strict=True)]
        self._before_BT = torch.tensor(last, device=self._device)[:, None]
        for slot, start in zip(self._slots, self._starts, strict=True):
            del memory.fed[slot][start:]

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Feed the next token of every sequence and return the logits [B, V] of the token after it."""
        tokens_BT = torch.cat((self._before_BT, tokens_B[self._order_B][:, None]), dim=1)
        hidden_BTD = self._memory._append(self._slots, self._starts, tokens_BT)
        for slot, tokens in zip(self._slots, tokens_BT.tolist(), strict=True):
            self._memory.fed[slot] += tokens
        self._starts = [start + tokens_BT.shape[1] for start in self._starts]
        self._before_BT = self._before_BT[:, :0]
        self.hidden_BD = hidden_BTD[self._back_B, -1]
        return self._memory.draft.unembed(self.hidden_BD)
