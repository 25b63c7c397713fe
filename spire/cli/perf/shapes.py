"""`--shape`: a temporary pair of a known shape with random weights, in place of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spire.cli.paths import Pair
from spire.errors import SpireError
from spire.perf.shapes import SHAPES, Shape

# Vocabulary size for the paper's 67M target; the paper does not name one.
_VOCABULARY = 32768


@contextmanager
def random_pair(name: str, layers: int | None, positions: int) -> Iterator[tuple[Pair, str]]:
    """Yield a temporary target of this shape, its draft, and their title. Raises SpireError for an unknown shape."""
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
