"""Choice of target and draft: options, SPIRE_MODEL and SPIRE_DRAFT, or a pair that has a name.

`tiny` is the pair in the repository's `models/`; `smollm2` is SmolLM2-135M-Instruct, with a draft from there.

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
from spire.checkpoints.smollm2 import NotAvailable, smollm2, smollm2_directory
from spire.errors import CheckpointError, SpireError
from spire.model.config import MAGICDEC, load_draft_config, load_model_config
from spire.perf.shapes import SHAPES

BUNDLED = Path(spire.__file__).resolve().parents[1] / "models"
TINY, SMOLLM2, OFF = Path("tiny"), Path("smollm2"), "off"
_TINY_TARGET = BUNDLED / "target"
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

    `model` is a directory, a GGUF file, `tiny` (as is None), `smollm2`, or a repository of the Hugging Face hub.
    `draft` is a directory, `magicdec` or `off`; None: the one that comes with the target, if any.
    """
    target = target_directory(model)
    load_model_config(target)
    if draft == OFF:
        return Pair(target, None)
    if draft == MAGICDEC:
        return Pair(target, None, magicdec=True)
    found = own_draft(target) if draft is None else Path(draft)
    if found is not None:
        load_draft_config(found)
        return Pair(target, found)
    return Pair(
        target,
        None,
        f"no --draft given for this model: decoding plainly. It can draft for itself with --draft {MAGICDEC}, "
        "or train it a draft with: spire train draft",
    )


def first_pair(draft: str | None) -> Pair:
    """Return the pair that is served if no model is named: `smollm2`, or `tiny` where that cannot be had."""
    try:
        return choose_pair(smollm2(), draft)
    except NotAvailable as error:
        return replace(choose_pair(None, draft), note=f"serving a toy that writes nonsense, because {error}")


def target_directory(model: Path | None) -> Path:
    """Return the directory of a target, named as in `choose_pair`. A directory wins over a name that it shares."""
    if model is None or (model == TINY and not model.exists()):
        if not _TINY_TARGET.is_dir():
            raise CheckpointError(f"no bundled model at {_TINY_TARGET}: name a model directory with --model DIR")
        return _TINY_TARGET
    return smollm2() if model == SMOLLM2 and not model.exists() else model_directory(model)


def own_draft(target: Path) -> Path | None:
    """Return the directory of the draft that comes with the target in this directory, or None."""
    drafts = {_TINY_TARGET: BUNDLED / "draft", smollm2_directory(): BUNDLED / "smollm2-draft"}
    found = (draft for owner, draft in drafts.items() if owner.resolve() == target.resolve())
    return next((draft for draft in found if draft.is_dir()), None)


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
