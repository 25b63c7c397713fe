"""Training sequences from chats: whole conversations, of which a draft learns the answers.

Texts among them are cut into sequences of a fixed length and learned whole. Sequences of like length form a batch and
are padded at their ends. The batches of a step depend on (seed, step) alone, so that a run can be resumed.

Shapes: B sequences, L positions, N sequences of a corpus, P positions of all of them, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from spire.errors import DataError
from spire.files import user_cache, write_whole
from spire.progress import bytes_shown
from spire.text.documents import Chats, Segment, read_segments
from spire.text.text_files import bytes_to_read, find_files

# Version of the division into sequences: sequences cached by an earlier version are not reused.
_VERSION = b"2"
# Sequences are padded to multiples of this, so that steps have few different lengths.
_PADDED_TO = 64


class TrainingBatch(NamedTuple):
    """Token ids [B, L], and bool [B, L]: true for positions whose next token is learned. `numbers`: which sequences."""

    tokens_BL: Tensor
    learned_BL: Tensor | None = None
    numbers: Sequence[int] = ()

    def to(self, device: str) -> TrainingBatch:
        learned_BL = None if self.learned_BL is None else self.learned_BL.to(device)
        return self._replace(tokens_BL=self.tokens_BL.to(device), learned_BL=learned_BL)


class Conversations:
    """A corpus of N token sequences: all tokens [P], whether each is learned [P], and where sequences start [N + 1]."""

    def __init__(self, tokens: NDArray[np.uint32], learned: NDArray[np.bool_], starts: NDArray[np.int64], name: str):
        self.tokens, self.learned, self.starts = tokens, learned, starts
        # Identifies the corpus in the names of files derived from it.
        self.name = name
        self._lengths = np.diff(starts)
        self._groups: dict[int, list[NDArray[np.int64]]] = {}

    @classmethod
    def build(
        cls, paths: list[Path], tokenizer: Tokenizer, start: int, end: int, chats: Chats, length: int, longest: int
    ) -> Conversations:
        """Tokenize the documents in `paths`, or load the cached tokens of the same files, tokenizer and template.

        Texts are cut into sequences of `length` tokens, each with the token `start` before it; conversations are cut
        off after `longest` tokens. Raises DataError if there is nothing to learn.
        """
        files = find_files(paths)
        key = hashlib.sha256(
            _VERSION + tokenizer.to_str().encode() + chats.key.encode() + f"{length} {longest}".encode()
        )
        for file in files:
            key.update(f"{file.resolve()}{file.stat().st_size}{file.stat().st_mtime_ns}".encode())
        name = key.hexdigest()[:16]
        cached = user_cache() / f"conversations-{name}.npz"
        if not cached.exists():
            with bytes_shown("tokenizing", bytes_to_read(files)) as told:
                found = _collected(read_segments(files, chats, told), tokenizer, (start, end), length, longest)
            write_whole(cached, lambda unfinished: np.savez(unfinished, *found))
        with np.load(cached) as stored:
            tokens, learned, starts = (stored[f"arr_{number}"] for number in range(3))
        if not learned.any():
            raise DataError(f"{', '.join(map(str, paths))}: no conversation has an answer of an assistant to learn")
        return cls(tokens, learned, starts, name)

    @property
    def learned_tokens(self) -> NDArray[np.uint32]:
        return self.tokens[self.learned]

    def batch(self, seed: int, step: int, most_tokens: int) -> TrainingBatch:
        """Return one step's batch of at most `most_tokens` tokens, padding included, or one longer sequence."""
        return self._padded(self._of_step(seed, step, most_tokens))

    def length_at(self, seed: int, step: int, most_tokens: int) -> int:
        """Return the padded length of one step's sequences."""
        return _padded_length(int(self._lengths[self._of_step(seed, step, most_tokens)].max()))

    def by_length(self, most_tokens: int) -> Iterator[TrainingBatch]:
        """Yield all sequences once, the longest first."""
        for numbers in reversed(self._grouped(most_tokens)):
            yield self._padded(numbers)

    def steps_per_epoch(self, most_tokens: int) -> int:
        return len(self._grouped(most_tokens))

    def _of_step(self, seed: int, step: int, most_tokens: int) -> NDArray[np.int64]:
        groups = self._grouped(most_tokens)
        epoch, at = divmod(step, len(groups))
        return groups[np.random.default_rng((seed, epoch)).permutation(len(groups))[at]]

    def _grouped(self, most_tokens: int) -> list[NDArray[np.int64]]:
        """Divide all sequences, by length, into groups of at most `most_tokens` padded tokens."""
        if most_tokens not in self._groups:
            groups: list[list[int]] = [[]]
            for number in np.argsort(self._lengths, kind="stable").tolist():
                if groups[-1] and (len(groups[-1]) + 1) * _padded_length(int(self._lengths[number])) > most_tokens:
                    groups.append([])
                groups[-1].append(number)
            self._groups[most_tokens] = [np.array(group) for group in groups]
        return self._groups[most_tokens]

    def _padded(self, numbers: NDArray[np.int64]) -> TrainingBatch:
        length = _padded_length(int(self._lengths[numbers].max()))
        tokens, learned = np.zeros((len(numbers), length), np.int64), np.zeros((len(numbers), length), np.bool_)
        for row, number in enumerate(numbers):
            first, end = self.starts[number : number + 2]
            tokens[row, : end - first] = self.tokens[first:end]
            learned[row, : end - first - 1] = self.learned[first + 1 : end]
        return TrainingBatch(torch.from_numpy(tokens), torch.from_numpy(learned), numbers.tolist())


def _padded_length(length: int) -> int:
    return -(-length // _PADDED_TO) * _PADDED_TO


def _collected(
    documents: Iterator[list[Segment]], tokenizer: Tokenizer, ends: tuple[int, int], length: int, longest: int
) -> tuple[NDArray[np.uint32], NDArray[np.bool_], NDArray[np.int64]]:
    """Return all tokens, whether each is learned, and where each sequence starts."""
    tokens, learned, starts = list[NDArray[np.uint32]](), list[NDArray[np.bool_]](), [0]
    for segments in documents:
        for ids, flags in _sequences(segments, tokenizer, ends, length, longest):
            if any(flags[1:]):
                tokens.append(np.array(ids, dtype=np.uint32))
                learned.append(np.array(flags))
                starts.append(starts[-1] + len(ids))
    if not tokens:
        return np.zeros(0, np.uint32), np.zeros(0, np.bool_), np.array(starts)
    return np.concatenate(tokens), np.concatenate(learned), np.array(starts)


def _sequences(
    segments: list[Segment], tokenizer: Tokenizer, ends: tuple[int, int], length: int, longest: int
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the ids of a document's sequences, and whether each token is learned.

    Segments are encoded one by one, as a prompt and its answer are while serving.
    """
    encoded = [(tokenizer.encode(segment.text, add_special_tokens=False).ids, segment) for segment in segments]
    if segments[0].of_text:
        start, end = ends
        ids = [*encoded[0][0], end]
        for first in range(0, len(ids), length - 1):
            piece = ids[first : first + length - 1]
            yield [start, *piece], [True] * (len(piece) + 1)
        return
    ids = [token for of_segment, _ in encoded for token in of_segment]
    flags = [segment.learned for of_segment, segment in encoded for _ in of_segment]
    yield ids[:longest], flags[:longest]
