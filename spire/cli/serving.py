"""The system that a measurement talks to: one that runs already, or one started for it and stopped after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spire.cli.paths import Pair
from spire.cli.up import ModelOptions, Stack


@contextmanager
def serving(url: str | None, pair: Pair, options: ModelOptions) -> Iterator[str]:
    """The URL of a gateway: `url` if given, else of services that live as long as this block."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="spire-") as directory:
        stack = Stack(pair, options, "127.0.0.1", port=0, k=None, directory=Path(directory))
        try:
            stack.start()
            yield stack.url
        finally:
            stack.stop()
