"""A SPIRe draft with one CPU kernel each for its memory, passes and sampling: `spire/kernels/draft.h`.

A draft is so small that torch spends most of a pass on dispatch. Keys and values of a round's own positions are stored
in a separate buffer, and the memory is read in place.

Shapes: B sequences, k passes, R verified positions, N layers, S entries of a slot, V vocabulary of the target, W
vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from spire.decoding.drafting import DraftingRound, Stopping
from spire.decoding.randomness import Purpose
from spire.decoding.sampling import SamplingRows
from spire.kernels import Kernels
from spire.model.backends.cpu.fused_layer import MOST_ROTATIONS, FusedLayer, FusedProduct, Rotations
from spire.model.backends.cpu.fused_sampling import KernelSampling
from spire.model.draft import Draft
from spire.model.draft_memory import DraftMemory
from spire.model.stop_head import TOLD, StopHead

# Activations are absorbed by one thread unless that takes more multiplications than this. Beside a verifier and a
# gateway, a second core is often busy, and waiting for it takes longer than absorbing the few positions of a round.
_SHARED = 2**24


class FusedDraftMemory(DraftMemory):
    """The memory of a packed draft, and the addresses of its entries and of the draft's weights, for kernels."""

    def __init__(self, draft: Draft, slots: int, kernels: Kernels):
        super().__init__(draft, slots)
        self.kernels = kernels
        layers = cast(Sequence[FusedLayer], draft.layers)
        memories = zip(layers, self.keys_NXGSK, self.values_NXGSK, strict=True)
        table = [[*layer.addresses, keys.data_ptr(), values.data_ptr()] for layer, keys, values in memories]
        self.layers = torch.tensor(table, dtype=torch.int64)
        self.feedback = draft.memory_weights.softmax(dim=-1).float() if draft.draft.feedback else None
        self.unembedding = cast(FusedProduct, draft.fused_head).weight
        self.outputs = draft.draft.vocabulary or draft.config.vocab_size
        self.rotations = Rotations(draft.rope, kernels.dtype)
        head = draft.stop_head
        self.stop_head = FusedStopHead.of(head, draft.config.hidden_size) if head else None

    def absorb(self, slots_R: Tensor, positions_R: Tensor, taps_RND: Tensor) -> None:
        config, spire = self.draft.config, self.draft.draft
        R, N, D = taps_RND.shape
        if not R:
            return
        G, K = config.num_key_value_heads, config.head_dim
        ends_R = positions_R + 1  # no position is outside of the window
        rope = self.rotations.at(positions_R, int(ends_R.max()))
        scratch = torch.empty(R * 2 * (D + G * K), dtype=self.kernels.dtype)
        numbers = (x.contiguous() for x in (taps_RND, positions_R, ends_R, slots_R))
        tensors = (self.layers, *numbers, *rope, self.positions_XS, scratch)
        shape = (R, N, D, config.num_attention_heads, G, K, self.positions_XS.shape[1], spire.window, spire.sink)
        threads = torch.get_num_threads() if R * N * D * 2 * G * K > _SHARED else 1
        self.kernels.absorb(*tensors, config.rms_norm_eps, *shape, threads)

    def round(self, slots: Sequence[int], bases: Sequence[int], k: int) -> DraftingRound:
        """Begin a drafting round by kernels, or by layers for positions beyond those whose rotations are cached."""
        if (end := max(bases) + k) > MOST_ROTATIONS:
            return super().round(slots, bases, k)
        return FusedRound(self, torch.tensor(slots), torch.tensor(bases), k, end)


class FusedStopHead(NamedTuple):
    """A stop head's weights as the kernels take them, in fp32: see `Stop` in `spire/kernels/kernels.h`."""

    weights: tuple[Tensor, ...]
    depth: int
    width: int

    @classmethod
    def of(cls, head: StopHead, hidden_size: int) -> FusedStopHead:
        enter_WE, layers = head.enter.weight.float(), [cast(nn.Linear, layer) for layer in head.residual]
        depth, width = len(layers), head.enter.out_features
        residual = torch.cat([torch.empty(0), *(layer.weight.float().flatten() for layer in layers)])
        biases = torch.cat([torch.empty(0), *(layer.bias.float() for layer in layers)])
        leave = torch.cat((head.leave.weight.float().flatten(), head.leave.bias.float()))
        enter = (enter_WE[:, :hidden_size].contiguous(), enter_WE[:, hidden_size:].T.contiguous())
        return cls((*enter, head.enter.bias.float(), residual, biases, leave), depth, width)


class FusedRound:
    """A drafting round by kernels: k passes from positions `base_B` on, all below `end` <= MOST_ROTATIONS."""

    def __init__(self, fused: FusedDraftMemory, slots_B: Tensor, base_B: Tensor, k: int, end: int):
        draft, config, spire = fused.draft, fused.draft.config, fused.draft.draft
        B, N, S = len(slots_B), config.num_hidden_layers, fused.positions_XS.shape[1]
        H, G, K = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        D, F = config.hidden_size, config.intermediate_size
        self._kernels, self._k, self._passes = fused.kernels, k, 0
        self._stop_head = fused.stop_head
        rope = fused.rotations.until(end)
        own = torch.empty(N * 2 * B * G * k * K, dtype=fused.kernels.dtype)
        scratch = torch.empty(B * (D * (N + 3) + K * (2 * H + 2 * G + 2) + F), dtype=fused.kernels.dtype)
        self._draft, self._logits_BW = draft, torch.empty(B, fused.outputs)
        norm_D = cast(nn.RMSNorm, draft.norm).weight
        place = (fused.positions_XS, slots_B.contiguous(), base_B.contiguous(), *rope)
        self._hidden = scratch[B * D * (N + 2) :][: B * D].view(B, D)
        # The draft and these keep the tensors alive while their addresses are used.
        self._weights = (fused.layers, draft.embed_tokens.weight, norm_D)
        self._tensors = (fused.feedback, *place, own, scratch, self._logits_BW, draft.vocabulary)
        weights = (*_addresses(self._weights), *fused.unembedding.addresses)
        shape = (B, k, N, D, H, G, K, F, fused.outputs, S, spire.window, spire.sink, spire.attends_self)
        self._round = (*weights, *_addresses(self._tensors), config.rms_norm_eps, *shape)

    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Feed the next token of every sequence; return the logits [B, V] after it, valid until the next pass."""
        self._kernels.draft_pass(self._round, self._passes, tokens_B.contiguous(), torch.get_num_threads())
        self._passes += 1
        self.hidden_BD = self._hidden
        return self._draft.spread(self._logits_BW)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (B, k, W) of the distributions that a round draws from."""
        B, W = self._logits_BW.shape
        return B, self._k, W

    def drawn(
        self,
        newest_B: Tensor,
        rows: SamplingRows,
        base_B: Tensor,
        probs_BKW: Tensor | None = None,
        stop: Stopping | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run all k passes and return the drawn tokens [B, k] and their bfloat16 distributions q, [B, k, W].

        The distributions are written to `probs_BKW` if given, those of sequences whose rule does not need q not at all.
        With `stop`, a sequence that stops takes part in no further pass; returned are then the numbers of tokens drawn,
        too.
        """
        tokens_KB = newest_B.new_zeros(self._k, len(newest_B))
        if probs_BKW is None:
            probs_BKW = torch.empty(self.shape, dtype=torch.bfloat16)
        sampling = KernelSampling.of(rows, base_B, self._draft.config.vocab_size)
        uniforms_BK = rows.uniforms(base_B, self._k, Purpose.DRAFT).contiguous()
        stopping, counts_B = self._stop(stop)
        drawn = (newest_B.contiguous(), sampling.arguments, uniforms_BK, tokens_KB, probs_BKW)
        self._kernels.draft_round(self._round, *drawn, stopping, torch.get_num_threads())
        return tokens_KB.T, probs_BKW, counts_B

    def _stop(self, stop: Stopping | None) -> tuple[tuple[int, ...], Tensor | None]:
        """Return what the kernels need to stop, nothing without `stop`, and where they write the counts."""
        if stop is None:
            return (), None
        head, B, D, W = self._stop_head, len(stop.least_B), self._hidden.shape[1], self._logits_BW.shape[1]
        assert head is not None
        scratch = torch.empty(B * (W + D + 2 * head.width + TOLD))
        stands_B, counts_B = torch.ones(B), torch.zeros(B, dtype=torch.int64)
        self._stopping = (*head.weights, stop.least_B.float().contiguous(), scratch, stands_B, counts_B)
        return (*(tensor.data_ptr() for tensor in self._stopping), head.depth, head.width), counts_B


def _addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
