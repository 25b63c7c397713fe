"""A SPIRe draft that nobody trained: layers of its target. It guesses badly, which no text may show."""

from __future__ import annotations

from pathlib import Path

import torch

from spire.checkpoints.weights import load_target, save_draft
from spire.model.config import DraftConfig
from spire.model.draft import last_layers, prune


def untrained_draft(model: Path, out: Path, layers: tuple[int, ...] | None = None, window: int = 64) -> Path:
    """Write the draft of these target layers, the last two if none are named, to `out`."""
    target, fingerprint = load_target(model)
    copied = layers or last_layers(target.config, 2)
    draft = DraftConfig(target_fingerprint=fingerprint, tapped_layers=copied, window=window)
    save_draft(out, prune(target, draft, copied), torch.float32)
    return out
