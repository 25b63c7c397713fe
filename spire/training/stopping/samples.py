"""Samples for a stop head: tokens that its draft guesses after the target's own text, judged by the target.

The draft drafts blocks after many places of the text, as it does while serving: the soft labels min(1, p/q) of
SpecDec++, section 3.3, are exact for what the head will see. The paper mixes the draft's tokens into the text at random
instead, which puts tokens into the context that the target would have rejected.

Shapes: N drafted tokens, D width of the draft; in a block J depths, B sequences, T places.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spire.checkpoints.weights import sampled_hash
from spire.errors import DataError
from spire.files import user_cache, write_whole
from spire.model.draft import Draft, RolloutBlocks
from spire.model.stop_head import TOLD
from spire.model.target import Target
from spire.progress import count_shown
from spire.training.branches import judged_blocks
from spire.training.conversations import TrainingBatch
from spire.training.sources import Source

# The temperatures at which the draft draws, each in a third of the sequences.
_TEMPERATURES = (0.0, 0.7, 1.0)
# Batches that are kept in one file, and batches without a sample after which there are none.
_BATCHES_A_FILE, _MOST_EMPTY = 8, 96


class Samples(NamedTuple):
    """Drafted tokens: hidden states [N, D], what the head is told [N, 5], labels [N], and weights [N].

    The weight is the probability that the target accepts all tokens before it in the block.
    """

    hidden_ND: Tensor
    told_NF: Tensor
    accepted_N: Tensor
    reached_N: Tensor

    @classmethod
    def joined(cls, parts: list[Samples]) -> Samples:
        return cls(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))

    def part(self, start: int, end: int) -> Samples:
        return Samples(*(tensor[start:end] for tensor in self))


def collect(draft: Draft, target: Target, source: Source, count: int, k: int, seed: int, doing: str) -> Samples:
    """Draft and judge blocks of k tokens until there are `count` samples. Raises DataError for text without any.

    What has been collected stays in the user's cache: the next head for the same draft and text is trained at once, and
    after an interruption the same command goes on.
    """
    kept = _kept_in(draft, source, k, seed)
    parts = [Samples(**load_file(file)) for file in _complete(kept)]
    first, had = len(parts) * _BATCHES_A_FILE, sum(len(part.accepted_N) for part in parts)
    with count_shown(doing, count, "tokens", done=min(had, count)) as progress:
        while had < count:
            batches = list[Samples]()
            for step in range(first, first + _BATCHES_A_FILE):
                batches.append(_of_batch(draft, target, source.batch(step), k, seed, step))
                progress.advance(len(batches[-1].accepted_N))
            parts.append(Samples.joined(batches))
            write_whole(kept / f"{first:08d}.safetensors", partial(save_file, parts[-1]._asdict()))
            first, had = first + _BATCHES_A_FILE, had + len(parts[-1].accepted_N)
            if not had and first >= _MOST_EMPTY:
                raise DataError(f"no sequence is as long as a block of {k} tokens")
    return Samples.joined(parts).part(0, count)


def _kept_in(draft: Draft, source: Source, k: int, seed: int) -> Path:
    """Return the directory for what this draft guesses in this text."""
    of_draft = sampled_hash(draft.layers.state_dict(), draft.draft.model_dump_json(exclude={"stop_head"}))
    name = hashlib.sha256(f"{of_draft} {source.data} {k} {seed}".encode()).hexdigest()[:16]
    return user_cache() / f"drafted-{name}"


def _complete(directory: Path) -> list[Path]:
    """Return the files of samples up to the first that is missing, in order."""
    files = sorted(directory.glob("[0-9]" * 8 + ".safetensors"))
    return [file for at, file in enumerate(files) if int(file.stem) == at * _BATCHES_A_FILE]


def _of_batch(draft: Draft, target: Target, batch: TrainingBatch, k: int, seed: int, step: int) -> Samples:
    """Return the samples of one batch: those whose place in the text is learned, in blocks from a random offset on."""
    device = draft.embed_tokens.weight.device
    batch, random = batch.to(str(device)), torch.Generator(device).manual_seed(seed << 32 | step)
    tokens_BL = batch.tokens_BL
    B, L = tokens_BL.shape
    if 2 * k >= L:
        D = draft.config.hidden_size
        return Samples(torch.empty(0, D, dtype=torch.bfloat16), torch.empty(0, TOLD), torch.empty(0), torch.empty(0))
    offset = 1 + int(torch.randint(k, (1,), generator=random, device=device))
    blocks = RolloutBlocks.of(L, k, offset, device)
    chosen_B = torch.randint(len(_TEMPERATURES), (B,), generator=random, device=device)
    temperature_B = torch.tensor(_TEMPERATURES, device=device)[chosen_B]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        judged = judged_blocks(draft, target, tokens_BL, blocks, temperature_B, random)
    accepted_JBT = judged.accepted_JBT
    before_JBT = torch.cat((torch.ones_like(accepted_JBT[:1]), accepted_JBT[:-1]))
    at_JT = blocks.starts_T + torch.arange(k, device=device)[:, None]
    learned_JBT = torch.ones_like(accepted_JBT, dtype=torch.bool)
    if batch.learned_BL is not None:
        learned_JBT = batch.learned_BL[:, at_JT].transpose(0, 1)
    parts = (judged.hidden_JBTD.bfloat16(), judged.told_JBTF, accepted_JBT, before_JBT.cumprod(dim=0))
    return Samples(*(part[learned_JBT].cpu() for part in parts))
