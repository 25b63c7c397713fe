"""The target's outputs that a draft's training needs: the activations that the draft remembers, and what determines p.

The distribution over any tokens follows from the final hidden state, the rows of the unembedding and the logarithm of
the normaliser. So no tensor of [tokens, vocabulary] is kept. Where training uses sequences again, their outputs are
stored in the user's cache, and the target runs once for each.

Shapes: B sequences, L positions, N tapped layers, D width, V vocabulary, P positions of all sequences.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from spire.files import user_cache
from spire.model.target import Target, WholeSequence
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
        self._sequences = sequences
        positions = len(sequences.tokens)
        self._rows = np.memmap(directory / "rows.bin", np.uint16, "r", shape=(positions, tapped + 1, width))
        self._log_sums = np.memmap(directory / "log_sums.bin", np.float32, "r", shape=(positions,))

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
            unfinished = directory.with_suffix(".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _store(unfinished, target, sequences, tapped, device, f"outputs of the target ({size / 1e9:.1f} GB)")
            unfinished.rename(directory)
        return cls(directory, sequences, len(tapped), width)

    def __call__(self, batch: TrainingBatch) -> Taught:
        B, L = batch.tokens_BL.shape
        rows = np.zeros((B, L, *self._rows.shape[1:]), np.uint16)
        log_sums = np.zeros((B, L), np.float32)
        for row, number in enumerate(batch.numbers):
            first, end = self._sequences.starts[number : number + 2]
            rows[row, : end - first] = self._rows[first:end]
            log_sums[row, : end - first] = self._log_sums[first:end]
        rows_BLND = torch.from_numpy(rows).view(torch.bfloat16)
        return Taught(rows_BLND[:, :, :-1], rows_BLND[:, :, -1], torch.from_numpy(log_sums))


def _store(
    directory: Path, target: Target, sequences: Conversations, tapped: tuple[int, ...], device: str, doing: str
) -> None:
    """Write the target's outputs for all sequences, sequences of like length together."""
    positions, width = len(sequences.tokens), target.config.hidden_size
    rows = np.memmap(directory / "rows.bin", np.uint16, "w+", shape=(positions, len(tapped) + 1, width))
    log_sums = np.memmap(directory / "log_sums.bin", np.float32, "w+", shape=(positions,))
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,} tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), refresh_per_second=2) as progress:
        task = progress.add_task(doing, total=positions)
        for batch in sequences.by_length(_STORED_AT_ONCE):
            with torch.autocast(device, dtype=torch.bfloat16):
                taught = teach(target, batch.tokens_BL.to(device), tapped)
            parts = [] if taught.taps_BLND is None else [taught.taps_BLND]
            whole_BLND = torch.cat([*parts, taught.hidden_BLD[:, :, None]], dim=2).to("cpu", torch.bfloat16)
            found = whole_BLND.view(torch.uint16).numpy(), taught.log_sum_BL.float().cpu().numpy()
            for row, number in enumerate(batch.numbers):
                first, end = sequences.starts[number : number + 2]
                rows[first:end], log_sums[first:end] = (numbers[row, : end - first] for numbers in found)
                progress.advance(task, end - first)
    rows.flush()
    log_sums.flush()
