"""Sampling parameters of B sequences by address, as the kernels of `spire/kernels/sampling.h` take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spire.decoding.sampling import SamplingRows
from spire.kernels import Kernels


@dataclass(frozen=True)
class KernelSampling:
    """`Sampling` of `spire/kernels/kernels.h`: how the tokens of B sequences of a round are drawn."""

    # Temperatures, top_k, top_p, min_p, rules, seeds, choices, bases [B]: alive as long as their addresses are used.
    tensors: tuple[Tensor, ...]
    vocab_size: int

    @classmethod
    def of(cls, rows: SamplingRows, base_B: Tensor, vocab_size: int) -> KernelSampling:
        """`base_B`: positions before the round's first token. `vocab_size`: the target's, also for a draft of fewer."""
        truncation = (rows.top_k_B, rows.top_p_B, rows.min_p_B)
        given = (rows.temperature_B, *truncation, rows.rule_B, rows.seed_B, rows.choice_B, base_B)
        return cls(tuple(tensor.contiguous() for tensor in given), vocab_size)

    @property
    def arguments(self) -> tuple[int, ...]:
        return (*(tensor.data_ptr() for tensor in self.tensors), self.vocab_size)


def draw(
    kernels: Kernels,
    logits_BV: Tensor,
    sampling: KernelSampling,
    step: int,
    uniforms_B: Tensor,
    tokens_B: Tensor,
    probs_BV: Tensor,
) -> None:
    """Sample `tokens_B`, the tokens at a step of a round, from the logits, which are overwritten; write q to `probs_BV`
    for sequences whose rule needs it."""
    tensors = (uniforms_B, tokens_B, probs_BV)
    shape = (probs_BV.stride(0), *logits_BV.shape)
    kernels.draw(logits_BV, sampling.arguments, step, *tensors, *shape, torch.get_num_threads())
