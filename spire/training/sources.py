"""Training data of a draft, batch by batch: random windows of text, or whole conversations.

Shapes: B sequences, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spire.model.target import Target
from spire.training.conversations import Conversations, TrainingBatch
from spire.training.corpus import TokenStream, described
from spire.training.on_policy import OnPolicy
from spire.training.teacher import StoredTeacher

# The target's outputs are stored if training uses the sequences as often as this.
_USED_AGAIN = 1.5


class Source(Protocol):
    """Batches of training sequences, which depend on the step alone."""

    @property
    def data(self) -> str:
        """A description of all tokens, by which an interrupted run recognises its data."""

    def batch(self, step: int) -> TrainingBatch:
        """Return one step's batch."""

    def length_at(self, step: int) -> int:
        """Return the length of one step's sequences."""

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often each token occurs, [V]; a token that is learned counts V times as much."""

    def stored_outputs(
        self, target: Target, identity: str, tapped: tuple[int, ...], device: str, steps: int
    ) -> StoredTeacher | None:
        """Store the target's outputs for all sequences, if so many steps use them again; None if they do not."""


class Windows:
    """Random windows of a text, of the length that `length_at` gives for a step."""

    def __init__(
        self, stream: TokenStream | OnPolicy, seed: int, tokens_per_step: int, length_at: Callable[[int], int]
    ):
        self._stream, self._seed, self._tokens_per_step = stream, seed, tokens_per_step
        self.length_at = length_at

    @property
    def data(self) -> str:
        return described(self._text.tokens)

    @property
    def _text(self) -> TokenStream:
        return self._stream.stream if isinstance(self._stream, OnPolicy) else self._stream

    def batch(self, step: int) -> TrainingBatch:
        length = self.length_at(step)
        rows = max(1, self._tokens_per_step // length)
        return TrainingBatch(torch.from_numpy(self._stream.batch(self._seed, step, rows, length)))

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        return np.bincount(self._text.tokens, minlength=vocab_size)

    def stored_outputs(
        self, target: Target, identity: str, tapped: tuple[int, ...], device: str, steps: int
    ) -> StoredTeacher | None:
        return None  # hardly any window occurs twice


class WholeConversations:
    """Batches of conversations of like length, in another order in each epoch."""

    def __init__(self, conversations: Conversations, seed: int, tokens_per_step: int):
        self._conversations, self._seed, self._tokens_per_step = conversations, seed, tokens_per_step

    @property
    def data(self) -> str:
        return described(self._conversations.tokens)

    def batch(self, step: int) -> TrainingBatch:
        return self._conversations.batch(self._seed, step, self._tokens_per_step)

    def length_at(self, step: int) -> int:
        return self._conversations.length_at(self._seed, step, self._tokens_per_step)

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        of_all, of_learned = (
            np.bincount(tokens, minlength=vocab_size)
            for tokens in (self._conversations.tokens, self._conversations.learned_tokens)
        )
        return of_all + vocab_size * of_learned

    def stored_outputs(
        self, target: Target, identity: str, tapped: tuple[int, ...], device: str, steps: int
    ) -> StoredTeacher | None:
        if steps < _USED_AGAIN * self._conversations.steps_per_epoch(self._tokens_per_step):
            return None
        return StoredTeacher.build(target, identity, self._conversations, tapped, device)


def most_frequent(source: Source, count: int | None, vocab_size: int, ends: tuple[int, ...]) -> Tensor | None:
    """Return the `count` tokens that occur most often, and the end tokens, ascending; None if `count` is None."""
    if count is None:
        return None
    often = source.counts(vocab_size)
    often[list(ends)] = often.max() + 1
    # Of tokens that occur equally often, those with lower ids.
    return torch.from_numpy(np.sort(np.argsort(-often, kind="stable")[:count]))
