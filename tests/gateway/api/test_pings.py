"""A stream whose tokens have no text yet stays alive by pings, on a clock of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.api.completion import Completion
from gateway.sequence import Sequence, State
from gateway.text.tokenizer import TextCodec
from tests.fake_clock import run
from tests.gateway.api.decoded import decoded

SPECIAL, WORD = 2, 300


async def generate(sequence: Sequence, tokens: list[int]) -> None:
    """Let a sequence get one of these tokens a second, and end with the last one."""
    for token in tokens:
        await asyncio.sleep(1)
        sequence.output.append(token)
        sequence.from_draft.append(False)
        sequence.listener()
    sequence.state, sequence.finish_reason = State.FINISHED, "length"
    sequence.listener()


@pytest.mark.parametrize(
    ("tokens", "pings_at"),
    [
        ([SPECIAL] * 50, [15, 30, 45]),
        ([SPECIAL] * 13 + [WORD] + [SPECIAL] * 20, [29]),
        ([WORD] * 50, []),
    ],
    ids=["no text", "one word", "words"],
)
def test_pings_come_whenever_nothing_was_written(stories_dir: Path, tokens: list[int], pings_at: list[int]) -> None:
    codec = TextCodec((stories_dir / "tokenizer.json").read_bytes())

    async def scenario() -> list[int]:
        completion = decoded(Completion, codec, [[7]], stream=True, ignore_eos=True)
        sequence = completion.choices[0].sequence
        sequence.output, sequence.from_draft, sequence.logprobs = [], [], []
        sequence.state, sequence.finish_reason = State.RUNNING, None
        loop = asyncio.get_running_loop()
        began, work = loop.time(), asyncio.create_task(generate(sequence, tokens))
        pings = [round(loop.time() - began) async for event in completion.events() if event.startswith(b":")]
        await work
        return pings

    assert run(scenario()) == pings_at
