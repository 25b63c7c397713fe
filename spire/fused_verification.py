"""Rejection and block verification from logits to tokens by one kernel, `spire/kernels/sampling.h`.

It takes the usual batch on a CPU, and does what `spire.sampling.probabilities` and `spire.verification.verify` do with
thirty operations of torch over all positions, for sequences that draw from the whole softmax or greedily. What a
verdict does not depend on is not computed: positions behind the first token that falls by rejection, what is left for
prefixes shorter than the one that stands.

Shapes: B sequences, K draft tokens at most, T = K + 1 positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spire.kernels import SHARES, every_kernels
from spire.randomness import Purpose
from spire.sampling import SamplingRows, Share
from spire.verification import SparseDistribution, Verdict


def judges(logits_BTV: Tensor, q: SparseDistribution | None, rows: SamplingRows) -> bool:
    """Whether the kernel can judge this batch."""
    _, T, V = logits_BTV.shape
    if logits_BTV.device.type != "cpu" or V % SHARES or not every_kernels() or not rows.of_softmax_alone:
        return False
    if T == 1:
        return True
    return rows.greedy is Share.ALL if q is None else q.collected


def judge(
    logits_BTV: Tensor,
    draft_BK: Tensor,
    counts_B: Tensor,
    q: SparseDistribution | None,
    rows: SamplingRows,
    base_B: Tensor,
) -> tuple[Verdict, Tensor]:
    """The verdict, and which rows' logits are all finite, int64 [B]. The logits, in fp32, are used up."""
    B, T, V = logits_BTV.shape
    coins_BK = rows.uniforms(base_B, T - 1, Purpose.ACCEPT) if q else torch.empty(B, 0)
    uniforms_BT = rows.uniforms(base_B, T, Purpose.SAMPLE)
    accepted_B, finite_B = torch.empty(2, B, dtype=torch.int64)
    verdict = Verdict(accepted_B, torch.empty(B, T, dtype=torch.int64))
    of_q = (q.probs_BKM, q.sum_BK) if q else (torch.empty(0), torch.empty(0))
    of_rows = (rows.temperature_B, rows.by_blocks_B)
    given = [x.contiguous() for x in (*of_rows, draft_BK, counts_B, *of_q, coins_BK, uniforms_BT)]
    found = (accepted_B, verdict.tokens_BT, finite_B)
    addresses = (x.data_ptr() for x in (logits_BTV, *given, *found))
    every_kernels()[0].judge(*addresses, B, T, V, torch.get_num_threads() if B > 1 else 1)
    return verdict, finite_B
