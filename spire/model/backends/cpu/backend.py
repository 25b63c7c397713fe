"""The CPU backend: this project's C kernels (`spire/kernels`), for the models, batches and parameters that fit them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import cast

from torch import Tensor, nn

from spire.decoding.drafting import Drafted, DraftingRound, RoundInputs
from spire.decoding.sampling import Share
from spire.decoding.verification import Verify, verify
from spire.errors import CheckpointError
from spire.model.backends.cpu.fused_draft import FusedDraftMemory, FusedRound
from spire.model.backends.cpu.fused_layer import (
    FusedLayer,
    FusedNorm,
    FusedProduct,
    PartlyFusedLayer,
    computed_by,
    kernels_behind,
    kernels_of,
)
from spire.model.backends.cpu.fused_target import FusedStack
from spire.model.backends.cpu.fused_verification import judge, judges
from spire.model.backends.reference import BlockBatch, ClaimQ, JudgingKernel, Model, Reference
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory
from spire.model.layers import Layer
from spire.model.target import KeyValues, Target, TargetOutput


class Fp8(Enum):
    """When a draft's weights are rounded to fp8."""

    NEVER = 0
    # If kernels support the draft so.
    IF_FITTING = 1
    # Otherwise the draft is refused.
    ALWAYS = 2


class CpuBackend(Reference):
    """C kernels in the place of the layers, the unembedding, the verdict and a draft's rounds."""

    def __init__(self, fp8: Fp8 = Fp8.NEVER) -> None:
        # Whether a draft's weights are rounded to fp8.
        self._fp8 = fp8
        # All layers of the packed target, if kernels support it.
        self._stack: FusedStack | None = None

    def pack(self, model: Model) -> Model:
        """Pack a model as the reference does. Raises CheckpointError for a draft that must be in fp8 (`Fp8.ALWAYS`) and
        that kernels do not support so."""
        config, weight = model.config, next(model.parameters())
        self.kernels, fp8 = computed_by(config, weight), isinstance(model, Draft) and self._fp8 is not Fp8.NEVER
        kernels = kernels_behind(config, weight)
        if fp8 and not kernels and self._fp8 is Fp8.ALWAYS:
            raise CheckpointError("--quantization fp8: no kernels here compute this draft: leave it out")
        if kernels:
            whole = kernels_of(config, weight) is not None
            kind = FusedLayer if whole else PartlyFusedLayer
            model.layers = nn.ModuleList(kind(layer, kernels, fp8) for layer in cast(Iterable[Layer], model.layers))
            model.replace_head(FusedProduct(model.lm_head, kernels, fp8))
            if isinstance(model, Target):
                model.norm = FusedNorm(cast(nn.RMSNorm, model.norm), kernels)
                self._stack = FusedStack(model, kernels) if whole else None
        return model

    def forward(
        self, target: Target, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        if self._stack and self._stack.takes(cache.fused):
            return TargetOutput(*self._stack(tokens_BT, cache.fused, tapped_layers))
        return super().forward(target, tokens_BT, cache, tapped_layers)

    def judging_kernel(self, vocabulary: int, blocks: BlockBatch, rule: Verify) -> JudgingKernel | None:
        draft_BK, counts_B, q, rows, _ = blocks
        return judge if rule is verify and judges(vocabulary, draft_BK, counts_B, q, rows) else None

    def memory(self, draft: Draft, slots: int) -> DraftMemory:
        if isinstance(layer := draft.layers[0], FusedLayer):
            return FusedDraftMemory(draft, slots, layer.kernels)
        return super().memory(draft, slots)

    def draft(self, round_: DraftingRound, inputs: RoundInputs, claim: ClaimQ) -> Drafted:
        newest_B, base_B, k, rows, candidates, vocabulary_W, stop = inputs
        if candidates is not None or rows.mix.nearly_greedy:
            return super().draft(round_, inputs, claim)
        if isinstance(round_, FusedRound):
            needs_q = rows.mix.judged_by_q is not Share.NONE
            there, place = (claim(round_.shape) if needs_q else None) or (None, None)
            tokens_BK, probs_BKW, counts_B = round_.drawn(newest_B, rows, base_B, there, stop)
            return Drafted(tokens_BK, None, probs_BKW, place, vocabulary_W, counts_B)
        if self._stack:  # a packed target drafts for itself
            tokens_BK, probs_BKV = self._stack.drawn(round_, newest_B, rows, base_B, k)
            return Drafted(tokens_BK, None, probs_BKV)
        return super().draft(round_, inputs, claim)
