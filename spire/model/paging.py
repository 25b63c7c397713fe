"""Pages of the KV cache: on a CPU, memory is reserved and released in pages of positions. Does not import torch."""

from __future__ import annotations

PAGE = 128


def positions_of(capacity: int) -> int:
    """Return the number of positions to allocate for a slot in which up to `capacity` positions can be committed.

    At least one position more than `capacity` is allocated, for the padding of rows whose slot is full.
    """
    return (capacity // PAGE + 1) * PAGE


def capacity_of(positions: int) -> int:
    """Return how many positions can be committed in a slot of `positions`: whole pages, less one for padding."""
    return max(0, positions // PAGE * PAGE - 1)
