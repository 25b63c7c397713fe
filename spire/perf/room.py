"""The size of a KV cache: sequences and positions as configured or, if not configured, as memory allows.

If a device allocates the whole cache at once, sequences and context are both cut to what fits. If memory is allocated
as it is written (on a CPU), sequences share the memory, and only one sequence of full length must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spire.errors import CheckpointError
from spire.model.paging import capacity_of, positions_of
from spire.perf.memory_need import SHARE_OF_FREE_MEMORY
from spire.service import machine_memory

# Unless a context is requested, the number of sequences is reduced before the context falls below this.
_USUAL_CONTEXT = 8192
# Shorter contexts are of no use.
_LEAST_CONTEXT = 256


@dataclass(frozen=True)
class Wishes:
    """Requested size of a KV cache: `context` positions of the longest sequence, `budget` bytes in all; 0 if not given.

    `sequences` is the number of simultaneous sequences, required if `exactly`, else at most as many as fit.
    """

    sequences: int
    exactly: bool = False
    context: int = 0
    budget: int = 0

    def check(self, longest: int) -> None:
        """Raise CheckpointError if the requested context exceeds `longest`, the model's maximum number of positions."""
        if self.context > longest:
            raise CheckpointError(f"--max-context {self.context}: the model takes at most {longest} positions")


@dataclass(frozen=True)
class Room:
    """A KV cache size that fits in memory. `budget` is its maximum in bytes; None: as much as the sequences need."""

    sequences: int
    context: int
    budget: int | None


def room_for(wishes: Wishes, longest: int, position_bytes: int, free: int, at_once: bool) -> Room:
    """Return a size of the KV cache that fits in `free` bytes, for a model that takes at most `longest` positions.

    `at_once`: the whole cache is allocated at the start. Raises CheckpointError, with a remedy, if `wishes` do not fit.
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
        remedy = "raise --cache-gb, or lower --max-context" if wishes.budget else "lower --max-context"
        raise CheckpointError(
            f"{_gb(allowed)} GB are too little for one sequence of {context} positions, which needs "
            f"{_gb(needed * position_bytes)} GB ({_allowed(wishes, allowed)}): {remedy}"
        )
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
    """Return the free memory of the GPU or, for a CPU, the free main memory, in bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # release what loading has cached
        return torch.cuda.mem_get_info(device)[0]
    return machine_memory.free_memory()


def _context(wishes: Wishes, longest: int, positions: int, at_once: bool) -> int:
    """Return the longest context that fits for as many sequences as would fit with the usual context."""
    sequences = 1
    if at_once:
        usual = positions_of(min(longest, _USUAL_CONTEXT))
        sequences = wishes.sequences if wishes.exactly else max(1, min(wishes.sequences, positions // usual))
    return max(min(longest, capacity_of(positions // sequences)), min(longest, _LEAST_CONTEXT))


def _allowed(wishes: Wishes, allowed: int) -> str:
    if wishes.budget:
        return f"--cache-gb is {_gb(allowed)}"
    return f"{_gb(allowed)} GB, {SHARE_OF_FREE_MEMORY:.0%} of what is free, are there for them"


def _gb(size: int) -> str:
    gigabytes = size / 1e9
    return f"{gigabytes:,.1f}".removesuffix(".0") if gigabytes >= 10 else f"{gigabytes:.3g}"
