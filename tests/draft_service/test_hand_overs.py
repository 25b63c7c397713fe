"""The way of a token and of an activation, function by function, is the one that docs/hand-overs.md lists.

Recorded from a live request: gateway, verifier and draft in this process, speaking gRPC.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from draft_service.drafter import Drafter
from draft_service.worker import Worker
from gateway.api import completion
from gateway.api.app import create_app
from gateway.config import GatewayConfig
from gateway.http.keys import Guard
from gateway.metrics import Metrics
from gateway.rounds.engine import Engine
from gateway.rounds.scheduler import Scheduler
from gateway.verifier_client import VerifierClient
from spire.model.backends.cpu import backend as cpu
from spire.service.inbox import Inbox
from tests.draft_service.conftest import eventually
from tests.draft_service.harness import following
from tests.paths import ROOT
from verifier_service.engine import step
from verifier_service.feed.subscriber import Subscriber
from verifier_service.serve.service import RoundsStream

OURS = ("gateway", "verifier_service", "draft_service", "spire.model.backends")
# Where a way begins on a stack: what is above serves every request or task alike.
ENTRIES = re.compile(r"complete|Engine\._run|VerifierEngine\._run|RoundsStream\._read|VerifierService\.Rounds")
# Loops and wrappers of threads, through which no activation passes.
WRAPPERS = re.compile(r"\b_run|_turn|_publish|<lambda>|Worker\._take|_do\b|Follower\.(run|_subscribed)")

Stack = tuple[str, ...]


class Recorder:
    """The stacks on which these functions were called, outermost first, by crossing."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.stacks: dict[str, set[Stack]] = defaultdict(set)
        self._patch = patch

    def watch(self, crossing: str, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.stacks[crossing].add((*stack(), real.__qualname__))
            return real(*args, **options)

        self._patch.setattr(owner, name, watched)

    def watch_answers(self, crossing: str) -> None:
        """The stream's own generator, which is called once and resumed for every answer."""
        real = RoundsStream.answers

        async def watched(stream: RoundsStream, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            async for answer in real(stream, requests):
                self.stacks[crossing].add((*stack(), real.__qualname__))
                yield answer

        self._patch.setattr(RoundsStream, "answers", watched)


def stack() -> Stack:
    """Names of our own functions on this stack, from where a way begins."""
    frame, names = sys._getframe(2), list[str]()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(OURS):
            names.append(frame.f_code.co_qualname.replace("_add_completions.<locals>.", ""))
        frame = frame.f_back  # type: ignore[assignment]
    names.reverse()
    first = next((at for at, name in enumerate(names) if ENTRIES.fullmatch(name)), 0)
    return tuple(names[first:])


def listed() -> dict[str, list[Stack]]:
    """Ways of docs/hand-overs.md: by crossing, the stacks, whose parts in brackets may be missing."""
    text = (ROOT / "docs" / "hand-overs.md").read_text()
    ways: dict[str, list[Stack]] = defaultdict(list)
    for crossing, way in re.findall(r"^(\w+ \d) (.+?)(?=^\w+ \d |^```)", text, re.MULTILINE | re.DOTALL):
        names = [name.strip() for name in way.replace("\n", " ").split("→")]
        choices = [["", name.strip("()")] if name.startswith("(") else [name] for name in names]
        ways[crossing] += [tuple(filter(None, chosen)) for chosen in product(*choices)]
    return ways


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(monkeypatch)
    recorder.watch("in 1", Scheduler, "add")
    recorder.watch("in 2", VerifierClient, "_write")
    recorder.watch("in 3", Inbox, "put")
    recorder.watch("in 4", step, "verify")
    recorder.watch("in 4", cpu, "judge")
    recorder.watch("out 1", RoundsStream, "_reply")
    recorder.watch_answers("out 2")
    recorder.watch("out 3", VerifierClient, "_answered")
    recorder.watch("out 4", Scheduler, "commit")
    recorder.watch("out 5", completion, "_event")
    recorder.watch("activation 1", Subscriber, "deliver")
    recorder.watch("activation 3", Worker, "absorb")
    recorder.watch("activation 4", Drafter, "absorb")
    return recorder


async def test_a_token_and_an_activation_go_the_way_that_is_listed(pair: tuple[Path, Path], recorder: Recorder) -> None:
    async with following(pair) as both:
        await both.start("a", [1, 2, 3, 4, 5])
        recorder.stacks.clear()
        assert (await both.decode("a", 2, 3))[1].drafted == 3
        activations = {name: ways for name, ways in recorder.stacks.items() if name.startswith("activation")}
        recorder.stacks.clear()
        config = GatewayConfig(_cli_parse_args=[], verifier=both.verifier.address)  # type: ignore[call-arg]
        engine = Engine(config, Metrics())
        await engine.handshake()
        engine.open()

        async def usable() -> bool:
            return engine.verifier.usable

        assert await eventually(usable)
        transport = httpx.ASGITransport(app=create_app(config, engine, Guard(None), "127.0.0.1"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"prompt": [3, 4, 5], "max_tokens": 12, "stream": True, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await engine.close()
    ways = listed()
    for crossing, stacks in (*recorder.stacks.items(), *activations.items()):
        for found in stacks:
            if crossing.startswith("activation"):
                found = tuple(name for name in found if not WRAPPERS.search(name))
            if not is_of_a_round(found):
                continue
            assert found in ways[crossing], f"{crossing}: {' → '.join(found)}"
    assert {*recorder.stacks, *activations, "activation 2"} == {*ways}


# Not of a Start, a call between two steps, a replay, or the stream of a draft.
ELSEWHERE = re.compile(
    r"_start|_accept|_finish_start|_advance|subscribe|Engine\.call|DraftConnections|stop|Follower|Requests|end$"
)


def is_of_a_round(found: Stack) -> bool:
    return not any(ELSEWHERE.search(name) for name in found[:-1])


@pytest.mark.parametrize(("way", "most"), [("in", 25), ("out", 25), ("activation", 10)])
def test_the_ways_are_as_short_as_they_shall_be(way: str, most: int) -> None:
    longest = [max(map(len, stacks)) for crossing, stacks in listed().items() if crossing.split()[0] == way]
    assert len(longest) >= 4
    assert sum(longest) <= most
