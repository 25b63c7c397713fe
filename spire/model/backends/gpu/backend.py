"""The GPU backend: CUDA graphs of the forward over a paged cache, of the verdict and of a draft's round.

A batch is padded to one of a few sizes, so that few graphs serve all batches. Padding writes to the padding page of the
cache, or to the padding slot of a draft's memory.

Shapes: B sequences, T positions, K draft tokens, P pages of a sequence, V vocabulary, D width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from spire.decoding.drafting import Drafted, DraftingRound, RoundInputs, draft_tokens
from spire.decoding.sampling import SamplingRows
from spire.decoding.verification import SparseDistribution, Verdict, Verify, verify
from spire.model.backends.gpu.draft_round import DraftKernels, GpuRound
from spire.model.backends.gpu.fp8 import quantise
from spire.model.backends.gpu.graphs import CudaRecorder, Graphs, Input, Outputs, Record
from spire.model.backends.gpu.kernels import computed_by, draft_kernels, elementwise_kernels, layers_fit
from spire.model.backends.gpu.packed_layer import PackedLayer
from spire.model.backends.gpu.stack import GpuStack
from spire.model.backends.reference import BlockBatch, ClaimQ, Judgement, Model, Reference
from spire.model.cache.paged import PagedView
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory, RoundMemory
from spire.model.layers import Layer
from spire.model.target import KeyValues, Target, TargetOutput

# The sizes of batches that have graphs.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
# The positions of a page table are a power of two of this.
_LEAST_POSITIONS = 1024
# A step that needs more memory for intermediate results of a layer is not recorded: a graph keeps it.
_MOST_TEMPORARY_BYTES = 2**29
_PARAMETERS = len(fields(SamplingRows))


class GpuBackend(Reference):
    """CUDA graphs where the work does not depend on numbers that only the GPU knows, single launches elsewhere."""

    kernels = "torch's own, CUDA graphs"

    def __init__(self, record: Record | None = None, fp8: bool = False):
        self._graphs = Graphs(record or CudaRecorder())
        # True if a draft's weights are to be in fp8.
        self._fp8 = fp8
        # All layers of the packed target, and the kernels for a packed draft, if kernels support the model.
        self._stack: GpuStack | None = None
        self._draft_kernels: DraftKernels | None = None

    def pack(self, model: Model) -> Model:
        model.layers = nn.ModuleList(PackedLayer(layer) for layer in cast(Iterable[Layer], model.layers))
        if self._fp8 and isinstance(model, Draft):
            quantise(model)
        elementwise = elementwise_kernels(model)
        if elementwise or not layers_fit(model.config):
            self.kernels = computed_by(model.config)
        if isinstance(model, Target) and elementwise:
            self._stack = GpuStack(model, elementwise)
        elif isinstance(model, Draft) and elementwise and (attention := draft_kernels(model)):
            self._draft_kernels = DraftKernels(elementwise, attention)
        return model

    def forward(
        self, target: Target, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        size = size_for(len(tokens_BT))
        if not (isinstance(cache, PagedView) and cache.decoding and size):
            return self._computed(target, tokens_BT, cache, tapped_layers)
        pages, T, padding_page = pages_for(cache), tokens_BT.shape[1], cache.cache.tables.padding_page
        if temporary_bytes(cache, size, pages) > _MOST_TEMPORARY_BYTES:
            return self._computed(target, tokens_BT, cache, tapped_layers)
        table_BP = pad(cache.table_BP, (0, pages - cache.table_BP.shape[1]), value=padding_page)
        inputs = Input(tokens_BT), Input(table_BP, padding_page), Input(cache.lengths_B, 0)

        def work(tokens_BT: Tensor, table_BP: Tensor, lengths_B: Tensor) -> Outputs:
            view = PagedView(cache.cache, table_BP, lengths_B, T, cache.kernels, decoding=True)
            hidden_BTD, taps_BTND = self._computed(target, tokens_BT, view, tapped_layers)
            return (hidden_BTD,) if taps_BTND is None else (hidden_BTD, taps_BTND)

        key = "forward", id(cache.cache), size, T, pages, tapped_layers, cache.kernels is None
        hidden_BTD, *taps = (output[: len(tokens_BT)] for output in self._graphs.run(key, size, inputs, work))
        # Activations are read after the next step has begun.
        return TargetOutput(hidden_BTD, taps[0].clone() if taps else None)

    def _computed(
        self, target: Target, tokens_BT: Tensor, cache: KeyValues, tapped_layers: tuple[int, ...]
    ) -> TargetOutput:
        if self._stack and isinstance(cache, PagedView):
            return self._stack(tokens_BT, cache, tapped_layers)
        return target(tokens_BT, cache, tapped_layers)

    def verdict(self, target: Target, hidden_BTD: Tensor, blocks: BlockBatch, rule: Verify = verify) -> Judgement:
        size, mix = size_for(len(hidden_BTD)), blocks.rows.mix
        if size is None:
            return super().verdict(target, hidden_BTD, blocks, rule)
        q, B = blocks.q and blocks.q.spread(target.config.vocab_size), len(hidden_BTD)
        of_q = () if q is None else (q.probs_BKM,) if q.ids_BKM is None else (q.probs_BKM, q.ids_BKM)
        of_blocks = hidden_BTD, blocks.draft_BK, blocks.counts_B, blocks.base_B, *parameters(blocks.rows), *of_q

        def work(hidden_BTD: Tensor, draft_BK: Tensor, counts_B: Tensor, base_B: Tensor, *rest: Tensor) -> Outputs:
            numbers, of_q = rest[:_PARAMETERS], rest[_PARAMETERS:]
            fixed = SamplingRows(*numbers).with_mix(mix)
            again = SparseDistribution((*of_q, None)[1], of_q[0]) if of_q else None
            verdict, finite_B = self.judge(
                target.unembed(hidden_BTD), BlockBatch(draft_BK, counts_B, again, fixed, base_B), rule
            )
            return verdict.accepted_B, verdict.tokens_BT, finite_B

        kinds = tuple((x.shape[1:], x.dtype) for x in (hidden_BTD, *of_q))
        found = self._graphs.run(("verdict", size, kinds, mix, rule), size, [*map(Input, of_blocks)], work)
        accepted_B, tokens_BT, finite_B = (output[:B] for output in found)
        return Judgement(Verdict(accepted_B, tokens_BT), finite_B, 0.0)

    def memory(self, draft: Draft, slots: int) -> DraftMemory:
        return PaddedMemory(draft, slots, self._draft_kernels, self._graphs)

    def draft(self, round_: DraftingRound, inputs: RoundInputs, claim: ClaimQ) -> Drafted:
        newest_B, base_B, k, rows, candidates, vocabulary_W, stop = inputs
        size, mix = size_for(len(newest_B)), rows.mix
        if not (isinstance(round_, PaddedRound) and size):
            return super().draft(round_, inputs, claim)
        memory, B = round_.memory, len(newest_B)
        numbers = (newest_B, base_B, *((stop.least_B,) if stop else ()), *parameters(rows))
        given = Input(round_.slots_B, memory.padding_slot), *map(Input, numbers)

        def work(slots_B: Tensor, newest_B: Tensor, base_B: Tensor, *numbers: Tensor) -> Outputs:
            fixed = SamplingRows(*numbers[1 if stop else 0 :]).with_mix(mix)
            # All k passes run: only verification is saved, to each sequence by itself.
            stops = stop and stop._replace(least_B=numbers[0])
            again = memory.begin(slots_B, base_B, k)
            found = draft_tokens(again, RoundInputs(newest_B, base_B, k, fixed, candidates, vocabulary_W, stops))
            others = (found.counts_B, found.probs_BKM, found.ids_BKM)
            return found.tokens_BK, *(x for x in others if x is not None)

        key = "draft", id(memory), size, k, mix, candidates, stop is not None
        tokens_BK, *others = (output[:B].clone() for output in self._graphs.run(key, size, given, work))
        counts_B = others.pop(0) if stop else None
        probs_BKM, ids_BKM = (*others, None, None)[:2]
        of_own = vocabulary_W if candidates is None else None
        return Drafted(tokens_BK, ids_BKM, probs_BKM, vocabulary_M=of_own, counts_B=counts_B)


class PaddedMemory(DraftMemory):
    """A draft's memory with a slot more, to which the rows of padding belong. Activations are absorbed by graphs."""

    def __init__(self, draft: Draft, slots: int, kernels: DraftKernels | None, graphs: Graphs):
        super().__init__(draft, slots + 1)
        self.slots = self.padding_slot = slots
        self._kernels, self._graphs = kernels, graphs

    def absorb(self, slots_R: Tensor, positions_R: Tensor, taps_RND: Tensor) -> None:
        size = size_for(len(slots_R))
        if size is None:
            return super().absorb(slots_R, positions_R, taps_RND)
        inputs = Input(slots_R, self.padding_slot), Input(positions_R, 0), Input(taps_RND)

        def work(*inputs: Tensor) -> Outputs:
            DraftMemory.absorb(self, *inputs)
            return ()

        self._graphs.run(("absorb", id(self), size), size, inputs, work)

    def begin(self, slots_B: Tensor, base_B: Tensor, k: int) -> DraftingRound:
        """Begin a round of k passes over these slots, by kernels if they support so many entries."""
        if self._kernels and self._kernels.attention.attends(self.places, k):
            return GpuRound(self, slots_B, base_B, k, self._kernels)
        return RoundMemory(self, slots_B, base_B, k)

    def round(self, slots: Sequence[int], bases: Sequence[int], k: int) -> DraftingRound:
        return PaddedRound(self, slots, bases, k)


class PaddedRound:
    """A round that has not begun: a graph begins and ends it, or its passes are run one by one."""

    def __init__(self, memory: PaddedMemory, slots: Sequence[int], bases: Sequence[int], k: int):
        self.memory, self._bases, self._k = memory, bases, k
        self.slots_B = torch.tensor(slots, device=memory.positions_XS.device)
        self._begun: DraftingRound | None = None

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        if self._begun is None:
            base_B = torch.tensor(self._bases, device=tokens_B.device)
            self._begun = self.memory.begin(self.slots_B, base_B, self._k)
        logits_BV = self._begun.next_logits(tokens_B)
        self.hidden_BD = self._begun.hidden_BD
        return logits_BV


def parameters(rows: SamplingRows) -> list[Tensor]:
    return [getattr(rows, field.name) for field in fields(rows)]


def size_for(count: int) -> int | None:
    """Return the size to which a batch of `count` sequences is padded, or None if it is larger than any."""
    at = bisect_left(_SIZES, count)
    return _SIZES[at] if at < len(_SIZES) else None


def pages_for(view: PagedView) -> int:
    """Return the number of pages to which this view's page table is padded."""
    page = view.cache.page
    positions = max(_LEAST_POSITIONS, 1 << (view.table_BP.shape[1] * page - 1).bit_length())
    return min(view.cache.pages, -(-positions // page))


def temporary_bytes(view: PagedView, size: int, pages: int) -> int:
    """Return about how much memory attention of a layer takes for `size` sequences with so many pages."""
    cache, positions = view.cache, pages * view.cache.page
    if view.kernels:  # partial results, in fp32, of each stretch of positions
        queries = cache.heads * cache.queries_per_key * view.shape[1]
        return size * queries * -(-positions // _LEAST_POSITIONS) * cache.width * 4
    return 4 * size * cache.heads * positions * cache.width * cache.pages_N2PGLK.element_size()
