"""Pages of a cache: on a CPU, positions are promised, held and given back by pages. Does not import torch."""

from __future__ import annotations

PAGE = 128


def positions_of(capacity: int) -> int:
    """Return the positions that a slot needs memory for in order to commit `capacity` positions.

    At least one column can never be committed: the padding of full rows goes there.
    """
    return (capacity // PAGE + 1) * PAGE


def capacity_of(positions: int) -> int:
    """Return the most positions that can be committed in a slot with memory for `positions` positions."""
    return max(0, positions // PAGE * PAGE - 1)
