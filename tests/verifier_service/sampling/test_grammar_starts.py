"""Grammars compile beside the rounds, and whatever happens meanwhile, every Start is answered and no slot is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.harness import GREEDY, Client, Verifier, prompt_of
from verifier_service.sampling.grammar import Grammars, Matcher

LETTERS = pb.Grammar(regex="[a-z ]+")


async def send(client: Client, sequence_id: str, grammar: pb.Grammar = LETTERS) -> None:
    start = pb.Start(sequence_id=sequence_id, tokens=prompt_of(9), sampling=GREEDY)
    start.adjustments.grammar.CopyFrom(grammar)
    await client.send(pb.RoundsRequest(start=start))


@contextmanager
def compiling_held_up(patch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events: compiling has begun; it may go on."""
    begun, go_on, compile_ = threading.Event(), threading.Event(), Grammars.compile

    def slowly(self: Grammars, grammar: pb.Grammar) -> Matcher:
        begun.set()
        assert go_on.wait(10)
        return compile_(self, grammar)

    patch.setattr(Grammars, "compile", slowly)
    try:
        yield begun, go_on
    finally:
        go_on.set()


async def test_a_start_whose_stream_breaks_while_compiling_takes_no_slot(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway comes back at once, so no lease frees what it has never heard of."""
    first = verifier.client("gateway")
    with compiling_held_up(monkeypatch) as (begun, go_on):
        await send(first, "a")
        assert await asyncio.to_thread(begun.wait, 10)
        again = verifier.client("gateway")
        await first.close()
        assert await again.release("a") == 0
        go_on.set()
        await again.start("b", prompt_of(9))
        await send(again, "c")
        assert (await again.read()).started.sequence_id == "c"
    assert set(verifier.engine.sequences) == {"b", "c"}


async def test_a_grammar_that_compiling_chokes_on_is_refused_like_any_other(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choke(self: Grammars, grammar: pb.Grammar) -> Matcher:
        raise OSError("Resource temporarily unavailable")

    client = verifier.client()
    monkeypatch.setattr(Grammars, "compile", choke)
    await send(client, "a")
    refused = (await client.read()).started
    assert (refused.sequence_id, refused.status.code) == ("a", codes.CODE_DATA_LOSS)
    assert "Resource temporarily unavailable" in refused.status.message


@contextmanager
def holding_up(patch: pytest.MonkeyPatch, asker: str) -> Iterator[tuple[list[str], threading.Event]]:
    """The regexes that compiling has begun with; those of `asker` wait for the event."""
    begun, go_on, compile_ = list[str](), threading.Event(), Grammars.compile

    def slowly(self: Grammars, grammar: pb.Grammar) -> Matcher:
        begun.append(grammar.regex)
        assert grammar.asker != asker or go_on.wait(60)
        return compile_(self, grammar)

    patch.setattr(Grammars, "compile", slowly)
    try:
        yield begun, go_on
    finally:
        go_on.set()


async def test_many_grammars_of_one_asker_delay_nobody_else(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = verifier.client()
    with holding_up(monkeypatch, "greedy"):
        for at in range(5):
            await send(client, f"many {at}", pb.Grammar(regex=f"[a-z]{{{at + 1}}}", asker="greedy"))
        await send(client, "other", pb.Grammar(regex="[a-z ]+", asker="other"))
        assert (await client.read()).started.sequence_id == "other"
    assert {(await client.read()).started.sequence_id for _ in range(5)} == {f"many {at}" for at in range(5)}


async def test_a_grammar_that_is_released_before_its_turn_is_never_compiled(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = verifier.client()
    with holding_up(monkeypatch, "one") as (begun, go_on):
        await send(client, "first", pb.Grammar(regex="[a-z]+", asker="one"))
        await send(client, "left", pb.Grammar(regex="[b-z]+", asker="one"))
        await send(client, "last", pb.Grammar(regex="[c-z]+", asker="one"))
        await client.start("behind them", prompt_of(9))
        await client.release("left")
        left = (await client.read()).started
        assert (left.sequence_id, left.status.code) == ("left", codes.CODE_NOT_FOUND)
        go_on.set()
        assert [(await client.read()).started.sequence_id for _ in range(2)] == ["first", "last"]
    assert begun == ["[a-z]+", "[c-z]+"]
    assert set(verifier.engine.sequences) == {"first", "behind them", "last"}
