"""`--shape`: a known shape with random weights in place of a model, for as long as a command runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spire.cli.paths import Pair
from spire.errors import SpireError
from spire.shapes import SHAPES, Shape

# Of the paper's 67M target, for which none is named.
_VOCABULARY = 32768


@contextmanager
def random_pair(name: str, layers: int | None, positions: int) -> Iterator[tuple[Pair, str]]:
    """A target of that shape and its draft, and what to call them. Raises SpireError for a shape that is not known."""
    shape, title = _shape(name, layers)
    from spire.bench.synthetic import write_pair

    with tempfile.TemporaryDirectory(prefix="SYNTHETIC-") as directory:
        yield Pair(*write_pair(Path(directory), shape, positions)), title


def _shape(name: str, layers: int | None) -> tuple[Shape, str]:
    if name not in SHAPES:
        raise SpireError(f"--shape {name} is not known: there is {', '.join(SHAPES)}")
    known = SHAPES[name].shape
    whole = replace(known, vocab_size=known.vocab_size or _VOCABULARY)
    if layers is None:
        return whole, name
    if layers > whole.layers:
        raise SpireError(f"--layers {layers}: {name} has {whole.layers} layers")
    return replace(whole, layers=layers), f"{name}, {layers} of {whole.layers} layers"
