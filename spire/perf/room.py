"""The size of a KV cache: sequences and positions as configured or, if not configured, as memory allows.

The sequences of the target share its memory page by page, so only one sequence of full length must fit. The sequences
of a draft on a GPU have memory of their own each, so all of them must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spire.errors import CheckpointError
from spire.model.cache.paging import capacity_of, positions_of
from spire.perf.memory_need import SHARE_OF_FREE_MEMORY
from spire.service import machine_memory

# Shorter contexts are of no use.
_LEAST_CONTEXT = 256


@dataclass(frozen=True)
class Wishes:
    """Requested size of a KV cache: `context` positions of the longest sequence, `budget` bytes in all; 0 if not given.

    `sequences` is the number of simultaneous sequences; a draft may have fewer unless `exactly`.
    """

    sequences: int
    exactly: bool = False
    context: int = 0
    budget: int = 0

    def check(self, longest: int, window: int | None = None) -> None:
        """Raise CheckpointError if the requested context exceeds `longest`, the model's maximum number of positions, or
        its sliding window, beyond which its attention is not supported."""
        if self.context > longest:
            raise CheckpointError(f"--max-context {self.context}: the model takes at most {longest} positions")
        if window and self.context > window:
            raise CheckpointError(
                f"--max-context {self.context}: attention slides over a window of {window} positions, beyond which the "
                f"model is not served: lower --max-context to {window}, or leave it out"
            )


@dataclass(frozen=True)
class Room:
    """A KV cache size that fits in memory. `budget` is its maximum in bytes; None: as much as the sequences need."""

    sequences: int
    context: int
    budget: int | None


def room_for(wishes: Wishes, longest: int, position_bytes: int, free: int, at_once: bool) -> Room:
    """Return a size of the KV cache that fits in `free` bytes, for a model that takes at most `longest` positions.

    `at_once`: the memory is allocated at the start, as on a GPU. Raises CheckpointError, with a remedy, if `wishes` do
    not fit.
    """
    wishes.check(longest)
    if at_once and wishes.budget > free:
        raise CheckpointError(
            f"--cache-gb {_gb(wishes.budget)}: {_gb(free)} GB are free; lower it, or leave it out for what fits"
        )
    allowed = wishes.budget or int(SHARE_OF_FREE_MEMORY * free)
    positions = allowed // position_bytes
    context = wishes.context or max(min(longest, capacity_of(positions)), min(longest, _LEAST_CONTEXT))
    needed = positions_of(context)
    if needed > positions:
        remedy = "raise --cache-gb, or lower --max-context" if wishes.budget else "lower --max-context"
        raise CheckpointError(
            f"{_gb(allowed)} GB are too little for one sequence of {context} positions, which needs "
            f"{_gb(needed * position_bytes)} GB ({_allowed(wishes, allowed)}): {remedy}"
        )
    all_fit = wishes.sequences * needed <= positions
    return Room(wishes.sequences, context, None if all_fit and not wishes.budget else allowed)


def sequences_for(wishes: Wishes, sequence_bytes: int, free: int) -> int:
    """Return the number of a draft's sequences, of `sequence_bytes` each, that fit in their share of `free` bytes.

    Raises CheckpointError if fewer than one fits, or fewer than requested exactly.
    """
    allowed = int(SHARE_OF_FREE_MEMORY * free)
    fitting = min(wishes.sequences, allowed // sequence_bytes)
    if fitting < (wishes.sequences if wishes.exactly else 1):
        wanted = wishes.sequences if wishes.exactly else 1
        remedy = f"lower --max-sequences to {fitting}" if fitting else "take a smaller draft, or a larger GPU"
        raise CheckpointError(
            f"{wanted} sequences need {_gb(wanted * sequence_bytes)} GB, {_allowed(wishes, allowed)}: {remedy}"
        )
    return fitting


def free_memory(device: torch.device) -> int:
    """Return the free memory of the GPU or, for a CPU, the free main memory, in bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # release what loading has cached
        return torch.cuda.mem_get_info(device)[0]
    return machine_memory.free_memory()


def _allowed(wishes: Wishes, allowed: int) -> str:
    if wishes.budget:
        return f"--cache-gb is {_gb(allowed)}"
    return f"{_gb(allowed)} GB, {SHARE_OF_FREE_MEMORY:.0%} of what is free, are there for them"


def _gb(size: int) -> str:
    gigabytes = size / 1e9
    return f"{gigabytes:,.1f}".removesuffix(".0") if gigabytes >= 10 else f"{gigabytes:.3g}"
