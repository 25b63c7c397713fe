"""LOSSY: a verification rule for benchmarks without trained weights. The text is meaningless, the timing realistic.

`--lossy-synthetic-acceptance A` makes a verifier accept each draft token with probability A, by coin flips that are a
function of seed and position. The verifier's log and the model's name, which every client sees, say LOSSY.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spire.decoding.randomness import Purpose
from spire.decoding.sampling import SamplingRows
from spire.decoding.verification import SparseDistribution, Verdict, Verify, verify


def coin_flips(rate: float) -> Verify:
    """Return a rule that takes as long as the lossless one, and accepts each draft token with probability `rate`."""

    def flip(
        p_BTV: Tensor,
        draft_BK: Tensor,
        counts_B: Tensor,
        q: SparseDistribution | None,
        rows: SamplingRows,
        base_B: Tensor,
    ) -> Verdict:
        honest = verify(p_BTV, draft_BK, counts_B, q, rows, base_B)
        offset_K = torch.arange(1, draft_BK.shape[1] + 1, device=draft_BK.device)
        heads_BK = rows.uniforms(base_B, len(offset_K), Purpose.ACCEPT) < rate
        accepted_B = (heads_BK & (offset_K <= counts_B[:, None])).long().cumprod(dim=1).sum(dim=1)
        final_B1 = honest.tokens_BT.gather(1, honest.accepted_B[:, None])
        return Verdict.of(draft_BK, accepted_B, final_B1[:, 0])

    return flip
