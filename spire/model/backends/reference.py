"""The backend seam: the operations of serving that kernels may replace, and their reference in torch for any device.

A backend computes the forward of the target over its cache, the verdict on draft tokens, and a draft's rounds. Each
backend is tested for equality with the reference, and takes the reference where its kernels do not fit.

Shapes: B sequences, T positions, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from spire.decoding.drafting import Drafted, DraftingRound, draft_tokens
from spire.decoding.sampling import SamplingRows, probabilities
from spire.decoding.verification import SparseDistribution, Verdict, verify
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory
from spire.model.target import KeyValues, Target, TargetOutput
from spire.v1.verifier_pb2 import RingSlice

Model = TypeVar("Model", Target, Draft)
# Claims memory for q of this shape where the verifier will read it. Returns the memory and its place, None if there is
# no room.
ClaimQ = Callable[[tuple[int, int, int]], tuple[Tensor, RingSlice] | None]


class Reference:
    """The reference backend. One object serves one model."""

    def pack(self, model: Model) -> Model:
        """Prepare a model for serving, in place. A packed model can be neither trained nor saved."""
        return model

    def forward(
        self, target: Target, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run the target on T new tokens per sequence, as `Target.forward` does."""
        return target(tokens_BT, cache, tapped_layers)

    def verdict(
        self,
        logits_BTV: Tensor,
        draft_BK: Tensor,
        counts_B: Tensor,
        q: SparseDistribution | None,
        rows: SamplingRows,
        base_B: Tensor,
    ) -> tuple[Verdict, Tensor]:
        """Verify a batch by `verify`, from logits that may be overwritten. Return the verdict and, by row, whether all
        logits but those of padding are finite."""
        finite_B = finite_rows(logits_BTV, counts_B)
        return verify(probabilities(logits_BTV, rows), draft_BK, counts_B, q, rows, base_B), finite_B

    def memory(self, draft: Draft, slots: int) -> DraftMemory:
        """Return the memory of a draft that attends to the target's activations, for `slots` sequences."""
        return DraftMemory(draft, slots)

    def draft(
        self,
        round_: DraftingRound,
        newest_B: Tensor,
        base_B: Tensor,
        k: int,
        rows: SamplingRows,
        candidates: int | None,
        claim: ClaimQ,
    ) -> Drafted:
        """Run a round of k passes, as `draft_tokens` does. If possible, q is written to memory from `claim`."""
        return draft_tokens(round_.next_logits, newest_B, base_B, k, rows, candidates)


def finite_rows(logits_BTV: Tensor, counts_B: Tensor) -> Tensor:
    """Return bool [B]: True for rows whose logits are finite up to the position after their `counts_B` draft tokens."""
    position_T = torch.arange(logits_BTV.shape[1], device=logits_BTV.device)
    finite_BT = logits_BTV.sum(dim=-1).isfinite() | (position_T > counts_B[:, None])
    return finite_BT.all(dim=1)
