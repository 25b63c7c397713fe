"""The target's outputs that a draft's training needs: the activations that the draft remembers, and what determines p.

The distribution over any tokens follows from the final hidden state, the rows of the unembedding and the logarithm of
the normaliser. So no tensor of [tokens, vocabulary] is kept. Where training uses sequences again, their outputs are
stored in the user's cache, and the target runs once for each.

Shapes: B sequences, L positions, N tapped layers, D width, V vocabulary, P positions of all sequences.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spire.files import made_once, user_cache
from spire.model.target import Target, WholeSequence
from spire.progress import count_shown
from spire.training.conversations import Conversations, TrainingBatch

# The most logits at a time.
MOST_LOGITS = 2**24
_STORED_AT_ONCE = 4096
# The share of the free disk that stored outputs may take.
_DISK_SHARE = 0.5


class Taught(NamedTuple):
    """The target's outputs for a batch: tapped activations [B, L, N, D], final hidden states [B, L, D], and the
    logarithms of the normalisers of p [B, L]."""

    taps_BLND: Tensor | None
    hidden_BLD: Tensor
    log_sum_BL: Tensor


# Returns the target's outputs for a batch.
Teacher = Callable[[TrainingBatch], Taught]


@torch.no_grad()
def teach(target: Target, tokens_BL: Tensor, tapped: tuple[int, ...]) -> Taught:
    """Run the target on whole sequences and return what a draft's training needs of its outputs."""
    output = target(tokens_BL, WholeSequence(tokens_BL), tapped)
    rows_RD = output.hidden_BTD.flatten(0, 1)
    parts = rows_RD.split(max(1, MOST_LOGITS // target.config.vocab_size))
    log_sum_R = torch.cat([target.unembed(part_RD).logsumexp(dim=-1) for part_RD in parts])
    return Taught(output.taps_BTND, output.hidden_BTD, log_sum_R.view(tokens_BL.shape))


class StoredTeacher:
    """The target's outputs for all sequences of a corpus, in two files: bfloat16 [P, N + 1, D] and float32 [P].

    The hidden state of a position follows its N activations.
    """

    def __init__(self, directory: Path, sequences: Conversations, tapped: int, width: int):
        # Read, not mapped: mapped pages count as memory of the process, up to the size of the file.
        self._sequences, self._row = sequences, (tapped + 1, width)
        self._rows, self._log_sums = ((directory / name).open("rb") for name in ("rows.bin", "log_sums.bin"))

    @classmethod
    def build(
        cls, target: Target, identity: str, sequences: Conversations, tapped: tuple[int, ...], device: str
    ) -> StoredTeacher | None:
        """Run the target over all sequences, or use the outputs of an earlier run. None if the disk is too small."""
        width, positions = target.config.hidden_size, len(sequences.tokens)
        layers = "-".join(map(str, tapped))
        directory = user_cache() / f"outputs-{identity}-{sequences.name}-{layers}"
        if not directory.exists():
            size = positions * ((len(tapped) + 1) * width * 2 + 4)
            user_cache().mkdir(parents=True, exist_ok=True)
            if size > _DISK_SHARE * shutil.disk_usage(user_cache()).free:
                return None
            doing = f"outputs of the target ({size / 1e9:.1f} GB)"
            made_once(directory, lambda unfinished: _store(unfinished, target, sequences, tapped, device, doing))
        return cls(directory, sequences, len(tapped), width)

    def __call__(self, batch: TrainingBatch) -> Taught:
        B, L = batch.tokens_BL.shape
        rows = np.zeros((B, L, *self._row), np.uint16)
        log_sums = np.zeros((B, L), np.float32)
        for row, number in enumerate(batch.numbers):
            first, end = self._sequences.starts[number : number + 2]
            rows[row, : end - first] = _read(self._rows, np.uint16, first, end, self._row)
            log_sums[row, : end - first] = _read(self._log_sums, np.float32, first, end)
        rows_BLND = torch.from_numpy(rows).view(torch.bfloat16)
        return Taught(rows_BLND[:, :, :-1], rows_BLND[:, :, -1], torch.from_numpy(log_sums))


def _read(file: BinaryIO, dtype: type[np.generic], first: int, end: int, row: tuple[int, ...] = ()) -> NDArray[Any]:
    """Return rows `first` to `end` of a file that holds nothing but rows of this shape."""
    numbers = math.prod(row)
    file.seek(first * numbers * np.dtype(dtype).itemsize)
    return np.fromfile(file, dtype, (end - first) * numbers).reshape(end - first, *row)


def _store(
    directory: Path, target: Target, sequences: Conversations, tapped: tuple[int, ...], device: str, doing: str
) -> None:
    """Write the target's outputs for all sequences, sequences of like length together."""
    directory.mkdir()
    with (
        (directory / "rows.bin").open("wb") as rows,
        (directory / "log_sums.bin").open("wb") as log_sums,
        count_shown(doing, len(sequences.tokens), "tokens") as progress,
    ):
        for batch in sequences.by_length(_STORED_AT_ONCE):
            with torch.autocast(device, dtype=torch.bfloat16):
                taught = teach(target, batch.tokens_BL.to(device), tapped)
            parts = [] if taught.taps_BLND is None else [taught.taps_BLND]
            whole_BLND = torch.cat([*parts, taught.hidden_BLD[:, :, None]], dim=2).to("cpu", torch.bfloat16)
            found = whole_BLND.view(torch.uint16).numpy(), taught.log_sum_BL.float().cpu().numpy()
            for row, number in enumerate(batch.numbers):
                first, end = sequences.starts[number : number + 2]
                for file, numbers in zip((rows, log_sums), found, strict=True):
                    file.seek(first * numbers[0, 0].nbytes)
                    file.write(numbers[row, : end - first].tobytes())
                progress.advance(end - first)
