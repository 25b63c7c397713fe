"""A Triton kernel for a SPIRe draft's attention on a GPU: to its memory, and to the positions of the round so far.

A memory is small (sink and window), so one program attends for one sequence and key/value head, all at once.

Shapes: B sequences, X slots, G key/value heads, H query heads, S entries of a slot, k passes of a round, K head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.model.config import DraftConfig

# The most entries and passes for which a program has registers.
_MOST_ENTRIES = 256
_LEAST_ROWS = 16
_LOG2_E = 1.4426950408889634


def attends(entries: int, k: int) -> bool:
    """True if the kernel supports a memory of this many entries and a round of k passes."""
    return entries + k <= _MOST_ENTRIES


def try_out(draft: DraftConfig, kv_heads: int, queries_per_key: int, width: int, like: Tensor) -> None:
    """Run the kernel for the shortest and the longest round, so that Triton compiles it now.

    `like` has the dtype and the device of the memory. Raises RuntimeError for a wrong result.
    """
    entries = draft.sink + draft.window
    for k in (1, MAX_SPECULATION_DEPTH):
        if attends(entries, k):
            memory = like.new_ones(1, kv_heads, entries, width)
            positions, zero_B = torch.arange(entries, device=like.device)[None], memory.new_zeros(1, dtype=torch.int64)
            own = like.new_ones(1, kv_heads, k, width)
            queries = like.new_ones(1, kv_heads * queries_per_key, width)
            found = attend(queries, memory, memory, positions, zero_B, own, own, zero_B + entries, 0, draft)
            if not torch.allclose(found.float(), torch.ones((), device=like.device), atol=1e-2):
                raise RuntimeError("attention over ones is not one")


def attend(
    queries_BHK: Tensor,
    keys_XGSK: Tensor,
    values_XGSK: Tensor,
    positions_XS: Tensor,
    slots_B: Tensor,
    own_keys_BGkK: Tensor,
    own_values_BGkK: Tensor,
    base_B: Tensor,
    passes: int,
    draft: DraftConfig,
) -> Tensor:
    """Return the attention of one new position per sequence, [B, H, K], in pass number `passes` of a round.

    The position is `base_B` + `passes`. It attends to entries of its slot with positions in the sink or the window, and
    to the round's positions before it. `own_keys_BGkK` and `own_values_BGkK` hold the round's keys and values so far.
    """
    found_BHK = torch.empty_like(queries_BHK)
    _launch_attend_memory(
        queries_BHK, keys_XGSK, values_XGSK, positions_XS, slots_B, own_keys_BGkK, own_values_BGkK, base_B, found_BHK,
        passes, draft.sink, draft.window, draft.attends_self,
    )  # fmt: skip
    return found_BHK


@custom_op("spire::attend_memory", mutates_args=("found_BHK",))
def _launch_attend_memory(
    queries_BHK: Tensor, keys_XGSK: Tensor, values_XGSK: Tensor, positions_XS: Tensor, slots_B: Tensor,
    own_keys_BGkK: Tensor, own_values_BGkK: Tensor, base_B: Tensor, found_BHK: Tensor,
    passes: int, sink: int, window: int, attends_self: bool,
) -> None:  # fmt: skip
    B, H, K = queries_BHK.shape
    _, G, S, _ = keys_XGSK.shape
    k = own_keys_BGkK.shape[2]
    entries = max(_LEAST_ROWS, triton.next_power_of_2(S + k))
    _attend_memory[(B, G)](
        queries_BHK, keys_XGSK, values_XGSK, positions_XS, slots_B, own_keys_BGkK, own_values_BGkK, base_B, found_BHK,
        K**-0.5 * _LOG2_E, passes, H // G, G, S, k, sink, window, int(attends_self),
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(H // G)), ENTRIES=entries, K=K, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["passes", "GROUP", "G", "S", "k", "sink", "window", "attends_self"])
def _attend_memory(
    queries, keys, values, positions, slots, own_keys, own_values, bases, found,
    scale, passes, GROUP, G, S, k, sink, window, attends_self,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    slot, base = tl.load(slots + sequence), tl.load(bases + sequence)
    query = base + passes
    row, entry, at = tl.arange(0, ROWS), tl.arange(0, ENTRIES), tl.arange(0, K)
    first = (sequence * G + head) * GROUP
    q = tl.load(queries + (first + row)[:, None] * K + at[None, :], mask=row[:, None] < GROUP, other=0.0)
    # Entries of the slot, then the positions of the round so far, this one included.
    held, own = entry < S, (entry >= S) & (entry - S <= passes)
    position = tl.load(positions + slot * S + entry, mask=held, other=-1)
    position = tl.where(own, base + entry - S, position)
    past = (position < query) | ((position == query) & (attends_self != 0))
    seen = (held | own) & (position >= 0) & past & ((position < sink) | (position >= query - window))
    of_slot = ((slot * G + head) * S + entry) * K
    of_round = ((sequence * G + head).to(tl.int64) * k + entry - S) * K
    key = tl.load(keys + of_slot[:, None] + at[None, :], mask=(held & seen)[:, None], other=0.0)
    key += tl.load(own_keys + of_round[:, None] + at[None, :], mask=(own & seen)[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    value = tl.load(values + of_slot[:, None] + at[None, :], mask=(held & seen)[:, None], other=0.0)
    value += tl.load(own_values + of_round[:, None] + at[None, :], mask=(own & seen)[:, None], other=0.0)
    weighted = tl.dot(p.to(value.dtype), value, input_precision="ieee") / tl.sum(p, 1)[:, None]
    tl.store(
        found + (first + row)[:, None] * K + at[None, :], weighted.to(found.dtype.element_ty),
        mask=row[:, None] < GROUP,
    )  # fmt: skip
