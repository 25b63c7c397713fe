"""Verification, from logits to tokens, by one CPU kernel: `spire/kernels/sampling.h`.

The kernel replaces `sampling.probabilities` and `verification.verify`. It skips work that cannot change the verdict:
positions after the first token that falls, and residuals of prefixes shorter than the prefix that block verification
accepts.

Shapes: B sequences, K draft tokens at most, T = K + 1 positions, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spire.decoding.sampling import SamplingRows, Share
from spire.decoding.verification import SparseDistribution, Verdict
from spire.kernels import SHARES, every_kernels
from spire.model.backends.cpu.fused_sampling import KernelSampling


def judges(
    vocabulary: int, draft_BK: Tensor, counts_B: Tensor, q: SparseDistribution | None, rows: SamplingRows
) -> bool:
    """True if the verification kernel supports this batch's device, vocabulary size, sampling parameters and q."""
    if draft_BK.device.type != "cpu" or vocabulary % SHARES or not every_kernels() or rows.mix.nearly_greedy:
        return False
    if draft_BK.shape[1] == 0:
        return True
    if q:
        return q.collected
    return rows.mix.judged_by_q is Share.NONE or not bool(((counts_B > 0) & rows.judged_by_q_B).any())


def judge(
    logits: Tensor,
    draft_BK: Tensor,
    counts_B: Tensor,
    q: SparseDistribution | None,
    rows: SamplingRows,
    base_B: Tensor,
) -> tuple[Verdict, Tensor]:
    """Verify a batch; return the verdict and, int64 [B], 1 for rows with finite logits.

    `logits`: fp32, with padding, [B, T, V], or without, [R, V]: one block after the other. They are overwritten.
    """
    (B, K), V = draft_BK.shape, logits.shape[-1]
    accepted_B, finite_B = torch.empty(2, B, dtype=torch.int64)
    verdict = Verdict(accepted_B, torch.empty(B, K + 1, dtype=torch.int64))
    of_q = (q.probs_BKM.contiguous(), q.sum_BK.contiguous()) if q else (None, None)
    sampling, vocabulary_W = KernelSampling.of(rows, base_B, V), q.vocabulary_M if q else None
    drafted = (draft_BK.contiguous(), counts_B.contiguous(), vocabulary_W, *of_q)
    shape, threads = (B, K + 1, V, q.probs_BKM.shape[-1] if q else V), torch.get_num_threads() if B > 1 else 1
    found = (accepted_B, verdict.tokens_BT, finite_B)
    every_kernels()[0].judge(logits, sampling.arguments, *drafted, *found, *shape, logits.ndim == 3, threads)
    return verdict, finite_B
