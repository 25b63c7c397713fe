"""The target by itself, which says what logprobs the services around it must give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gateway.text.tokenizer import TextCodec
from spire.checkpoints.weights import load_target
from spire.model.target import Target, WholeSequence

PROMPT = "Once upon a time, there was a little"
TOLERANCE = 2e-4


class Reference:
    """The target by itself: one forward over all tokens at once, without a cache."""

    def __init__(self, directory: Path):
        self.target: Target = load_target(directory)[0]
        self.codec = TextCodec((directory / "tokenizer.json").read_bytes())

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V] of what comes after each of T tokens."""
        tokens_BT = torch.tensor([tokens])
        return self.target.unembed(self.target(tokens_BT, WholeSequence(tokens_BT)).hidden_BTD)[0].double()

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        return (self.logits(tokens) / temperature).log_softmax(-1)


@pytest.fixture(scope="module")
def reference(stories_dir: Path) -> Reference:
    return Reference(stories_dir)
