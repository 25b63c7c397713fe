"""The room of a cache: as many sequences of as many positions as were asked for, or else as memory allows.

Where a device takes all of a cache at once, sequences and context are both cut to what fits. Where memory comes with
what is written (a CPU), sequences share what there is, and only one whole sequence must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spire import machine_memory
from spire.errors import CheckpointError
from spire.memory_need import SHARE_OF_FREE_MEMORY
from spire.model.paging import capacity_of, positions_of

# Sequences are left out before a context that nobody asked for is cut to less than this.
_USUAL_CONTEXT = 8192
# What is shorter serves nobody.
_LEAST_CONTEXT = 256


@dataclass(frozen=True)
class Wishes:
    """Options, 0 where nobody gave them: positions of the longest sequence, and bytes for all.

    `sequences` at once; `exactly` if somebody asked for so many, else as many of them as fit.
    """

    sequences: int
    exactly: bool = False
    context: int = 0
    budget: int = 0

    def check(self, longest: int) -> None:
        """Raises CheckpointError for a context beyond the positions that a model was made for."""
        if self.context > longest:
            raise CheckpointError(f"--max-context {self.context}: the model takes at most {longest} positions")


@dataclass(frozen=True)
class Room:
    """A size that fits. `budget`: bytes that the cache may take; None: whatever all these sequences need."""

    sequences: int
    context: int
    budget: int | None


def room_for(wishes: Wishes, longest: int, position_bytes: int, free: int, at_once: bool) -> Room:
    """The room of a cache of `position_bytes` a position, in `free` bytes, for a model of `longest` positions.

    `at_once`: all of it is allocated from the start. Raises CheckpointError that names the values and what to do.
    """
    wishes.check(longest)
    if at_once and wishes.budget > free:
        raise CheckpointError(
            f"--cache-gb {_gb(wishes.budget)}: {_gb(free)} GB are free; lower it, or leave it out for what fits"
        )
    allowed = wishes.budget or int(SHARE_OF_FREE_MEMORY * free)
    positions = allowed // position_bytes
    context = wishes.context or _context(wishes, longest, positions, at_once)
    needed = positions_of(context)
    if needed > positions:
        raise CheckpointError(_too_little(wishes, allowed, context, needed * position_bytes))
    fitting = min(wishes.sequences, positions // needed) if at_once else wishes.sequences
    if wishes.exactly and fitting < wishes.sequences:
        all_of_them = _gb(wishes.sequences * needed * position_bytes)
        raise CheckpointError(
            f"{wishes.sequences} sequences of {context} positions need {all_of_them} GB, {_allowed(wishes, allowed)}: "
            f"lower --max-sequences to {fitting}, or --max-context"
        )
    all_fit = fitting * needed <= positions
    return Room(fitting, context, None if all_fit and not wishes.budget else allowed)


def free_memory(device: torch.device) -> int:
    """Bytes that are free where a model computes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left
        return torch.cuda.mem_get_info(device)[0]
    return machine_memory.free_memory()


def _context(wishes: Wishes, longest: int, positions: int, at_once: bool) -> int:
    """The longest that fits, for as many sequences as can have a usual one."""
    sequences = 1
    if at_once:
        usual = positions_of(min(longest, _USUAL_CONTEXT))
        sequences = wishes.sequences if wishes.exactly else max(1, min(wishes.sequences, positions // usual))
    return max(min(longest, capacity_of(positions // sequences)), min(longest, _LEAST_CONTEXT))


def _too_little(wishes: Wishes, allowed: int, context: int, needed: int) -> str:
    what_to_do = "raise --cache-gb, or lower --max-context" if wishes.budget else "lower --max-context"
    return (
        f"{_gb(allowed)} GB are too little for one sequence of {context} positions, which needs {_gb(needed)} GB "
        f"({_allowed(wishes, allowed)}): {what_to_do}"
    )


def _allowed(wishes: Wishes, allowed: int) -> str:
    if wishes.budget:
        return f"--cache-gb is {_gb(allowed)}"
    return f"{_gb(allowed)} GB, {SHARE_OF_FREE_MEMORY:.0%} of what is free, are there for them"


def _gb(size: int) -> str:
    gigabytes = size / 1e9
    return f"{gigabytes:,.1f}".removesuffix(".0") if gigabytes >= 10 else f"{gigabytes:.3g}"
