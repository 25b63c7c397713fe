"""`--shape`: a known shape with random weights in place of a model, for as long as a command runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spire.cli.paths import Pair
from spire.errors import SpireError
from spire.perf_model import LLAMA_3_8B, LLAMA_3_70B, SEQAX_67M, Shape

# The paper names no vocabulary for its 67M target.
SHAPES = {
    "seqax-67m": replace(SEQAX_67M, vocab_size=32768),
    "llama-3-8b": LLAMA_3_8B,
    "llama-3-70b": LLAMA_3_70B,
}


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
    whole = SHAPES[name]
    if layers is None:
        return whole, name
    if layers > whole.layers:
        raise SpireError(f"--layers {layers}: {name} has {whole.layers} layers")
    return replace(whole, layers=layers), f"{name}, {layers} of {whole.layers} layers"
