"""Evaluation of a target on held-out text: bits per byte, and the gain from long contexts.

Shapes: B windows, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from spire.errors import DataError
from spire.model.target import Target, WholeSequence

_EARLY, _LATE = (256, 512), (1500, 2000)


@dataclass(frozen=True)
class TargetFigures:
    """Target figures. Losses are nats per token: `early_loss` and `late_loss` of the same tokens at other positions."""

    windows: int
    tokens: int
    loss: float
    bits_per_byte: float
    early_positions: tuple[int, int]
    early_loss: float
    late_positions: tuple[int, int]
    late_loss: float
    late_minus_early_ci95: float


@torch.inference_mode()
def evaluate_target(
    target: Target, tokenizer: Tokenizer, prompts: list[list[int]], advance: Callable[[], None]
) -> TargetFigures:
    """Evaluate a target on prompts of 2,001 tokens, the first a start token. Raises DataError for other lengths."""
    if any(len(prompt) != _LATE[1] + 1 for prompt in prompts):
        raise DataError(f"windows must have {_LATE[1] + 1} tokens")
    losses, early, late, size = [], [], [], 0
    for prompt in prompts:
        whole_T = token_losses(target, prompt)
        losses.append(whole_T.mean().item())
        size += len(tokenizer.decode(prompt[1:]).encode())
        late.append(whole_T[_LATE[0] - 1 : _LATE[1] - 1].mean().item())
        early.append(_same_tokens_early(target, prompt))
        advance()
    tokens = _LATE[1] * len(prompts)
    loss = sum(losses) / len(losses)
    gaps = torch.tensor(late) - torch.tensor(early)
    return TargetFigures(
        windows=len(prompts),
        tokens=tokens,
        loss=loss,
        bits_per_byte=loss * tokens / size / math.log(2),
        early_positions=_EARLY,
        early_loss=sum(early) / len(early),
        late_positions=_LATE,
        late_loss=sum(late) / len(late),
        late_minus_early_ci95=1.96 * gaps.std().item() / math.sqrt(len(gaps)),
    )


def _same_tokens_early(target: Target, prompt: list[int]) -> float:
    """Return the mean loss of the tokens at late positions if moved to the early positions, in two halves."""
    width = _EARLY[1] - _EARLY[0]
    sums = []
    for first in (_LATE[0], _LATE[1] - width):
        stretch = prompt[:1] + prompt[first - _EARLY[0] + 1 : first + width]
        sums.append(token_losses(target, stretch)[_EARLY[0] - 1 :])
    return torch.cat(sums).mean().item()


def token_losses(target: Target, tokens: list[int]) -> Tensor:
    """Return the cross-entropy in nats of each token after the first, [T - 1]."""
    tokens_1T = torch.tensor([tokens])
    logits_TV = target.unembed(target(tokens_1T[:, :-1], WholeSequence(tokens_1T[:, :-1])).hidden_BTD)[0]
    return torch.nn.functional.cross_entropy(logits_TV, tokens_1T[0, 1:], reduction="none")
