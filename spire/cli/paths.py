"""Choice of target and draft: options, SPIRE_MODEL and SPIRE_DRAFT, or the pair in the repository's `models/`.

With `--shape` target and draft are a temporary pair of a known shape with random weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import spire
from spire.checkpoints.named import model_directory
from spire.errors import CheckpointError, SpireError
from spire.model.config import MAGICDEC, load_draft_config, load_model_config
from spire.perf.shapes import SHAPES

BUNDLED = Path(spire.__file__).resolve().parents[1] / "models"
OFF = "off"
# Vocabulary size for the paper's 67M target; the paper does not name one.
_VOCABULARY = 32768


@dataclass(frozen=True)
class Pair:
    """A target directory and a draft directory. Without a draft, the target drafts for itself or decoding is plain.

    `magicdec`: the target drafts for itself. `note` explains plain decoding that was not requested.
    """

    model: Path
    draft: Path | None
    note: str = ""
    magicdec: bool = False

    @property
    def speculates(self) -> bool:
        return self.magicdec or self.draft is not None


def choose_pair(model: Path | None, draft: str | None) -> Pair:
    """Return the target and draft to serve. Raises CheckpointError for a directory that is missing or unusable.

    `model` is a directory, a GGUF file, or the name of a repository of the Hugging Face hub.
    """
    target = BUNDLED / "target" if model is None else model_directory(model)
    if model is None and not target.is_dir():
        raise CheckpointError(f"no bundled model at {target}: name a model directory with --model DIR")
    load_model_config(target)
    if draft == OFF:
        return Pair(target, None)
    if draft == MAGICDEC:
        return Pair(target, None, magicdec=True)
    if draft is not None:
        load_draft_config(Path(draft))
        return Pair(target, Path(draft))
    bundled = BUNDLED / "draft"
    if target.resolve() == (BUNDLED / "target").resolve() and bundled.is_dir():
        load_draft_config(bundled)
        return Pair(target, bundled)
    return Pair(
        target,
        None,
        f"no --draft given for this model: decoding plainly. It can draft for itself with --draft {MAGICDEC}, "
        "or train it a draft with: spire train draft",
    )


@contextmanager
def random_pair(name: str, layers: int | None, positions: int) -> Iterator[tuple[Pair, str]]:
    """Write a temporary target and draft of the shape `name` with random weights; yield the pair and its title.

    `layers` limits the target's layers, `positions` a sequence. Raises SpireError for unknown `name`, too many layers.
    """
    if name not in SHAPES:
        raise SpireError(f"--shape {name} is not known: there is {', '.join(SHAPES)}")
    shape, title = SHAPES[name].shape, name
    if layers is not None:
        if layers > shape.layers:
            raise SpireError(f"--layers {layers}: {name} has {shape.layers} layers")
        shape, title = replace(shape, layers=layers), f"{name}, {layers} of {shape.layers} layers"
    from spire.bench.synthetic import write_pair

    with tempfile.TemporaryDirectory(prefix="SYNTHETIC-") as directory:
        known = replace(shape, vocab_size=shape.vocab_size or _VOCABULARY)
        yield Pair(*write_pair(Path(directory), known, positions)), title
