"""The engine of a gateway before a verifier in memory, for tests of order, deadlines and deaths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.rounds.engine import Engine
from gateway.sequence import Sequence
from spire.v1.tensor_pb2 import Sampling
from tests.gateway.fake_verifier import FakeVerifier

_NUMBERS = count(1)


def sequence(prompt: int = 5, max_tokens: int = 8) -> Sequence:
    number = next(_NUMBERS)
    return Sequence(f"s{number}", [2 + number % 900] * prompt, Sampling(), max_tokens)


@asynccontextmanager
async def heart(verifier: FakeVerifier, **options: Any) -> AsyncIterator[Engine]:
    """The engine of a gateway that has met this verifier."""
    config = GatewayConfig(_cli_parse_args=[], **{"draft": "off"} | options)
    with patch("gateway.verifier_client.connect", verifier.connect):
        engine = Engine(config, Metrics())
    await engine.handshake()
    engine.open()
    await until(lambda: engine.verifier.usable)
    try:
        yield engine
    finally:
        await engine.close()


async def until(true: Callable[[], bool], within: float = 600.0) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < within, f"not within {within} s of fake time"
        await asyncio.sleep(0.001)


async def ended(*sequences: Sequence) -> None:
    await until(lambda: all(one.finished for one in sequences))
