"""A tiny pair whose services start fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.markov import write_markov_pair
from tests.services import Services, running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_markov_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def services(pair: tuple[Path, Path]) -> Iterator[Services]:
    with running(*pair) as services:
        yield services


async def eventually(true: Callable[[], Awaitable[bool]], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if await true():
            return True
        await asyncio.sleep(0.05)
    return False
