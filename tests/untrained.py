"""A SPIRe draft that nobody trained: layers of its target. It guesses badly, which no text may show."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spire.checkpoints.weights import load_embeddings, load_target, sampled_hash, save_draft
from spire.model.config import DraftConfig, SharedEmbeddings
from spire.model.draft import last_layers, prune


def untrained_draft(
    model: Path, out: Path, layers: tuple[int, ...] | None = None, window: int = 64, own: Tensor | None = None
) -> Path:
    """Write the draft of these target layers, the last two if none are named, to `out`.

    `own`: the tokens that it can propose; its embeddings are then its target's.
    """
    target, fingerprint = load_target(model)
    copied = layers or last_layers(target.config, 2)
    draft = DraftConfig(target_fingerprint=fingerprint, tapped_layers=copied, window=window)
    if own is not None:
        shared = SharedEmbeddings(scale=1.0, fingerprint=sampled_hash(load_embeddings(model)))
        draft = draft.model_copy(update={"vocabulary": len(own), "embeddings": shared})
    save_draft(out, prune(target, draft, copied, own), torch.float32)
    return out
