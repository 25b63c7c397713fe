"""The prefix cache: the tokens of each slot of the KV cache, so that a shared prefix is copied instead of computed.

The prefixes of live sequences can be copied too. A sequence that ends is parked, that is, copied to a parking slot,
until the memory is needed. Does not know: the keys and values, which the KV cache owns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from spire.errors import OutOfCapacity
from spire.model.cache.target_cache import TargetCache

# Shorter prefixes are computed as fast as they are copied.
SHORTEST = 64


class Prefixes:
    """The tokens of live and parked slots. Parked slots (of ended sequences) are ordered by last use, oldest first."""

    def __init__(self, cache: TargetCache, enabled: bool = True):
        slots = len(cache.lengths)
        self._cache, self._enabled = cache, enabled
        self._tokens_XL: NDArray[np.int32] = np.full((slots, cache.capacity), -1, dtype=np.int32)
        # The hash of each slot's cache salt: prefixes are reused between sequences of the same salt only.
        self._salts_X: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._empty = list(range(cache.slots, slots))
        self._parked: OrderedDict[int, None] = OrderedDict()

    def begin(self, slot: int, prompt: Rows[int], salt: str = "") -> None:
        """Record the prompt of a sequence that begins in this slot."""
        if self._enabled:
            self._write(slot, prompt, hash(salt))

    def longest(self, prompt: Rows[int], salt: str = "") -> tuple[int, int]:
        """Return the slot with the longest prefix of `prompt`, and the prefix's length, 0 if too short to copy."""
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
        """Forget the sequence in this slot, whose committed tokens are `tokens`; park a copy of it if memory allows."""
        salt = int(self._salts_X[slot])
        self._tokens_XL[slot] = -1  # so that the search finds what is parked
        place = self._place(tokens, salt) if self._enabled and len(tokens) >= SHORTEST else None
        if place is not None:
            self._park(slot, place, tokens, salt)

    def shed(self) -> bool:
        """Drop the least recently used parked sequence and free its memory. Return False if no sequence is parked."""
        if not self._parked:
            return False
        self._drop(next(iter(self._parked)))
        return True

    def _park(self, slot: int, place: int, tokens: Rows[int], salt: int) -> None:
        self._parked.pop(place, None)  # so that `shed` spares it: it is rewritten or dropped below
        self._cache.empty(place)
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
        """Choose the parking slot: that of a prefix of `tokens`, else an empty one, else the least recently used."""
        if self._parked:
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
