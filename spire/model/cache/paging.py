"""Pages of the KV cache: memory is reserved and released in pages of positions. Does not import torch."""

from __future__ import annotations

# On a CPU, and on a GPU, where a page is also what a program of the attention kernels reads at once.
PAGE, GPU_PAGE = 128, 64


def positions_of(capacity: int) -> int:
    """Return the number of positions to allocate for a slot in which up to `capacity` positions can be committed.

    At least one position more than `capacity` is allocated, for the padding of rows whose slot is full.
    """
    return (capacity // PAGE + 1) * PAGE


def capacity_of(positions: int) -> int:
    """Return how many positions can be committed in a slot of `positions`: whole pages, less one for padding."""
    return max(0, positions // PAGE * PAGE - 1)
