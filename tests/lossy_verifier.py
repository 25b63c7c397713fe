"""The verifier service with a rule that accepts every draft token: the negative control of the statistical tests."""

from __future__ import annotations

import torch
from torch import Tensor

import verifier_service.engine.step
from spire.decoding.randomness import Purpose
from spire.decoding.sampling import SamplingRows, draw
from spire.decoding.verification import SparseDistribution, Verdict
from verifier_service.__main__ import main


def accept_everything(
    p_BTV: Tensor,
    draft_BK: Tensor,
    counts_B: Tensor,
    q: SparseDistribution | None,
    rows: SamplingRows,
    base_B: Tensor,
) -> Verdict:
    row_B = torch.arange(len(p_BTV))
    uniforms_BT = rows.uniforms(base_B, p_BTV.shape[1], Purpose.SAMPLE)
    last_B = draw(p_BTV[row_B, counts_B], uniforms_BT[row_B, counts_B])
    return Verdict.of(draft_BK, counts_B, last_B)


verifier_service.engine.step.verify = accept_everything

if __name__ == "__main__":
    main()
