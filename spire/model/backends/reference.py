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
        packed = self.judging_kernel(target.config.vocab_size, blocks, rule) is not None
        logits = target.unembed(hidden_BTD[in_blocks(hidden_BTD.shape[1], blocks.counts_B)] if packed else hidden_BTD)
        unembedded = time.perf_counter()
        verdict, finite_B = self.judge(logits, blocks, rule)
        return Judgement(verdict, finite_B, unembedded - began)

    def judge(self, logits: Tensor, blocks: BlockBatch, rule: Verify = verify) -> tuple[Verdict, Tensor]:
        """Verify blocks from fp32 logits [B, T, V], which may be overwritten. Return the verdict, and true for finite
        rows. For a kernel, the logits may be those of all real positions, [R, V], block by block."""
        if kernel := self.judging_kernel(logits.shape[-1], blocks, rule):
            return kernel(logits, *blocks)
        finite_B = finite_rows(logits, blocks.counts_B)
        return rule(probabilities(logits, blocks.rows), *blocks), finite_B

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
    finite_BT = logits_BTV.sum(dim=-1).isfinite() | ~in_blocks(logits_BTV.shape[1], counts_B)
    return finite_BT.all(dim=1)


def in_blocks(positions: int, counts_B: Tensor) -> Tensor:
    """Return bool [B, T]: True for each block's newest token and draft tokens, False for padding."""
    return torch.arange(positions, device=counts_B.device) <= counts_B[:, None]
