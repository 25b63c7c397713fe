"""Prompts that begin alike: which tokens stand in which slot of the cache, so that their keys are copied, not computed.

Live sequences lend what they hold. One that ends is parked: copied out of the way, until the memory is needed.
It says which slot to copy from; keys and values are the cache's own business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from spire.errors import OutOfCapacity
from spire.model.cache import TargetCache

# Shorter ones are computed as fast as they are copied.
SHORTEST = 64


class Prefixes:
    """The tokens by slot, live and parked; the parked ones from the longest unused on."""

    def __init__(self, cache: TargetCache, enabled: bool = True):
        slots = len(cache.lengths)
        self._cache, self._enabled = cache, enabled
        self._tokens_XL: NDArray[np.int32] = np.full((slots, cache.capacity), -1, dtype=np.int32)
        # Hashes of what else must be the same.
        self._salts_X: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._empty = list(range(cache.slots, slots))
        self._parked: OrderedDict[int, None] = OrderedDict()

    @property
    def parked(self) -> int:
        return len(self._parked)

    def begin(self, slot: int, prompt: Rows[int], salt: str = "") -> None:
        """A sequence fills this slot from now on."""
        if self._enabled:
            self._write(slot, prompt, hash(salt))

    def longest(self, prompt: Rows[int], salt: str = "") -> tuple[int, int]:
        """The slot that holds most of the beginning of `prompt`, and how much; 0 when that is too little to copy."""
        return self._longest(prompt, hash(salt))

    def _longest(self, prompt: Rows[int], salt: int) -> tuple[int, int]:
        wanted_L = np.asarray(prompt, dtype=np.int32)
        if len(wanted_L) < SHORTEST:
            return 0, 0
        same_XL = self._tokens_XL[:, : len(wanted_L)] == wanted_L
        common_X = np.where(same_XL.all(axis=1), len(wanted_L), same_XL.argmin(axis=1))
        held_X = np.where(self._salts_X == salt, np.minimum(common_X, self._cache.lengths), 0)
        slot = int(held_X.argmax())
        if held_X[slot] < SHORTEST:
            return 0, 0
        if slot in self._parked:
            self._parked.move_to_end(slot)
        return slot, int(held_X[slot])

    def end(self, slot: int, tokens: Rows[int]) -> None:
        """A sequence of these committed tokens leaves its slot: park it where memory is left for it."""
        salt = int(self._salts_X[slot])
        place = self._place(tokens, salt) if self._enabled and len(tokens) >= SHORTEST else None
        if place is not None:
            self._park(slot, place, tokens, salt)
        self._tokens_XL[slot] = -1

    def shed(self) -> bool:
        """Give back the memory of the parked sequence that was used longest ago. False when there is none."""
        if not self._parked:
            return False
        self._drop(next(iter(self._parked)))
        return True

    def _park(self, slot: int, place: int, tokens: Rows[int], salt: int) -> None:
        self._parked.pop(place, None)  # it is to be written anew, or dropped
        while not self._cache.may_park(place, len(tokens)) and self.shed():
            pass
        try:
            if not self._cache.may_park(place, len(tokens)):
                raise OutOfCapacity(f"{len(tokens)} positions are more than may be parked")
            self._cache.copy(slot, place, len(tokens))
        except OutOfCapacity:
            self._drop(place)
            return
        self._write(place, tokens, salt)
        self._parked[place] = None

    def _place(self, tokens: Rows[int], salt: int) -> int | None:
        """Over what these tokens continue, else an empty place, else over the longest unused."""
        if self.parked:
            slot, length = self._longest(tokens, salt)
            if slot in self._parked and length == self._cache.lengths[slot]:
                return slot
        if self._empty:
            return self._empty.pop()
        return next(iter(self._parked), None)

    def _write(self, slot: int, tokens: Rows[int], salt: int) -> None:
        self._salts_X[slot] = salt
        self._tokens_XL[slot, : len(tokens)] = tokens
        self._tokens_XL[slot, len(tokens) :] = -1

    def _drop(self, place: int) -> None:
        self._cache.empty(place)
        self._tokens_XL[place] = -1
        self._parked.pop(place, None)
        self._empty.append(place)
