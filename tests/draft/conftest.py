"""A tiny pair whose services start fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.markov import write_markov_pair
from tests.services import Services, running

# q in the proposals themselves, where a test can read it.
INLINE = ("--shared-memory", "")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_markov_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def services(pair: tuple[Path, Path]) -> Iterator[Services]:
    with running(*pair, draft_options=["--top-m", "6", *INLINE]) as services:
        yield services
