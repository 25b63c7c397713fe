"""The backend seam: the operations of serving that kernels may replace, and their reference in torch for any device.

A backend computes the forward of the target over its cache, the verdict on draft tokens, and a draft's rounds. Each
backend is tested for equality with the reference, and takes the reference where its kernels do not fit.

Shapes: B sequences, T positions, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from spire.decoding.drafting import Drafted, DraftingRound, RoundInputs, draft_tokens
from spire.decoding.sampling import SamplingRows, probabilities
from spire.decoding.verification import SparseDistribution, Verdict, Verify, verify
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory
from spire.model.target import KeyValues, Target, TargetOutput
from spire.v1.verifier_pb2 import RingSlice

Model = TypeVar("Model", Target, Draft)
# Claims memory for q of this shape where the verifier will read it. Returns the memory and its place, None if there is
# no room.
ClaimQ = Callable[[tuple[int, int, int]], tuple[Tensor, RingSlice] | None]
# Maps logits and the fields of a `BlockBatch` to the verdict and, by row, whether the logits are finite.
JudgingKernel = Callable[..., tuple[Verdict, Tensor]]


class BlockBatch(NamedTuple):
    """A batch of blocks as a rule takes it: draft tokens, their numbers, q, sampling parameters, base positions."""

    draft_BK: Tensor
    counts_B: Tensor
    q: SparseDistribution | None
    rows: SamplingRows
    base_B: Tensor


class Judgement(NamedTuple):
    """The verdict on a batch; bool [B], true for rows whose logits but those of padding are finite; and the seconds
    that unembedding took, if it was a step of its own."""

    verdict: Verdict
    finite_B: Tensor
    unembed_seconds: float


class Reference:
    """The reference backend. One object serves one model.

    `kernels` names what computes the packed model, for people.
    """

    kernels = "torch's own"

    def pack(self, model: Model) -> Model:
        """Prepare a model for serving, in place. A packed model can be neither trained nor saved."""
        return model

    def forward(
        self, target: Target, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run the target on T new tokens per sequence, as `Target.forward` does."""
        return target(tokens_BT, cache, tapped_layers)

    def verdict(self, target: Target, hidden_BTD: Tensor, blocks: BlockBatch, rule: Verify = verify) -> Judgement:
        """Unembed the hidden states of a batch of blocks and verify the blocks by `rule`."""
        began = time.perf_counter()
        logits_BTV = target.unembed(hidden_BTD)
        unembedded = time.perf_counter()
        verdict, finite_B = self.judge(logits_BTV, blocks, rule)
        return Judgement(verdict, finite_B, unembedded - began)

    def judge(self, logits_BTV: Tensor, blocks: BlockBatch, rule: Verify = verify) -> tuple[Verdict, Tensor]:
        """Verify blocks from fp32 logits, which may be overwritten. Return the verdict, and true for finite rows."""
        if kernel := self.judging_kernel(logits_BTV.shape[-1], blocks, rule):
            return kernel(logits_BTV, *blocks)
        finite_B = finite_rows(logits_BTV, blocks.counts_B)
        return rule(probabilities(logits_BTV, blocks.rows), *blocks), finite_B

    def judging_kernel(self, vocabulary: int, blocks: BlockBatch, rule: Verify) -> JudgingKernel | None:
        """Return a kernel that verifies these blocks by this rule from their logits over the vocabulary, or None."""
        return None

    def memory(self, draft: Draft, slots: int) -> DraftMemory:
        """Return the memory of a draft that attends to the target's activations, for `slots` sequences."""
        return DraftMemory(draft, slots)

    def draft(self, round_: DraftingRound, inputs: RoundInputs, claim: ClaimQ) -> Drafted:
        """Run a round of k passes, as `draft_tokens` does. If possible, q is written to memory from `claim`."""
        return draft_tokens(round_, inputs)


def finite_rows(logits_BTV: Tensor, counts_B: Tensor) -> Tensor:
    """Return bool [B]: True for rows whose logits are finite up to the position after their `counts_B` draft tokens."""
    position_T = torch.arange(logits_BTV.shape[1], device=logits_BTV.device)
    finite_BT = logits_BTV.sum(dim=-1).isfinite() | (position_T > counts_B[:, None])
    return finite_BT.all(dim=1)
