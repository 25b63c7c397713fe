"""Pages of a cache: positions of a sequence are promised, held and given back by pages on a CPU. No torch here."""

from __future__ import annotations

PAGE = 128


def positions_of(capacity: int) -> int:
    """Positions whose memory a slot takes that can commit so many.

    At least one column more than can be committed: there the padding of full rows goes.
    """
    return (capacity // PAGE + 1) * PAGE


def capacity_of(positions: int) -> int:
    """The most that can be committed in the memory of so many positions."""
    return max(0, positions // PAGE * PAGE - 1)
