"""Chats as prompts of measurements: whole exchanges and a message to answer; degenerate answers are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spire.bench.chats import ChatSource, ChosenChats, source_of
from spire.bench.client import Request
from spire.checkpoints.tokenizer import load_tokenizer
from spire.errors import DataError
from tests.services import running

NAMES = ["Lily", "Tom", "Max", "Sue", "Ben", "Amy"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = (
        {"messages": [{"role": "user", "content": f"Who is {name}?"}, {"role": "assistant", "content": f"{name} ran."}]}
        for name in NAMES
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def url(stories_chat_dir: Path) -> Iterator[str]:
    with running(stories_chat_dir) as system:
        yield system.url


def texts(model: Path, prompts: list[list[int]]) -> list[str]:
    tokenizer = load_tokenizer(model)
    return [tokenizer.decode(prompt) for prompt in prompts]


@pytest.mark.parametrize("length", [40, 80, 200])
def test_a_prompt_is_a_message_behind_as_many_exchanges_as_fit(
    length: int, stories_chat_dir: Path, chats: Path
) -> None:
    prompts = ChatSource(stories_chat_dir, [chats]).cut(8, length, seed=1)
    assert all(len(prompt) <= length for prompt in prompts)
    for text in texts(stories_chat_dir, prompts):
        assert text.endswith("?\nassistant:")
        assert text.count("user:") == text.count("assistant:")
        last = text.rsplit("user: ", 1)[1].removesuffix("\nassistant:")
        assert text.count(last) == 1, "the message is not answered before it is asked"


def test_more_context_is_more_exchanges(stories_chat_dir: Path, chats: Path) -> None:
    source = ChatSource(stories_chat_dir, [chats])
    few, many = (texts(stories_chat_dir, source.cut(1, length, seed=1))[0].count("user:") for length in (30, 200))
    assert few == 1
    assert many == len(NAMES)


def test_the_same_arguments_give_the_same_prompts(stories_chat_dir: Path, chats: Path) -> None:
    one, other = (ChatSource(stories_chat_dir, [chats]) for _ in range(2))
    assert one.cut(4, 80, seed=3) == other.cut(4, 80, seed=3)
    assert one.cut(4, 80, seed=3) != one.cut(4, 80, seed=4)


def test_what_cannot_be_a_chat_is_refused_by_name(stories_dir: Path, stories_chat_dir: Path, chats: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        ChatSource(stories_dir, [chats])
    with pytest.raises(DataError, match="as short as 5 tokens"):
        ChatSource(stories_chat_dir, [chats]).cut(1, 5, seed=0)
    with pytest.raises(DataError, match="exclude each other"):
        source_of(stories_chat_dir, [chats], [chats])


def test_answers_that_end_early_are_left_out_and_told(url: str, stories_chat_dir: Path, chats: Path) -> None:
    """The answer to some of these chats is longer than 64 tokens, to others it is not."""
    source = ChatSource(stories_chat_dir, [chats])
    request = Request(max_tokens=96, temperature=1.0)
    chosen = ChosenChats(source, url, request)
    prompts = chosen.cut(6, 60, seed=2)
    assert len(prompts) == 6
    assert chosen.cut(6, 60, seed=2) is prompts
    assert chosen.tried - chosen.short - chosen.repetitive == 6
    assert f"left out of {chosen.tried} chats" in chosen.left_out


def test_a_model_that_ends_every_answer_early_is_told(url: str, stories_chat_dir: Path, chats: Path) -> None:
    source = ChatSource(stories_chat_dir, [chats])
    source.ends = set(range(512))
    with pytest.raises(DataError, match="too few prompts for 2 answers of 8 tokens: left out of 40 chats: 100%"):
        ChosenChats(source, url, Request(max_tokens=8)).cut(2, 60, seed=2)
