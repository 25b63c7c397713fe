"""Of conversations a draft learns the answers, each sequence once an epoch, and the target need not compute twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import load_target
from spire.errors import DataError
from spire.files import user_cache
from spire.text.documents import Chats
from spire.training.conversations import Conversations
from spire.training.teacher import StoredTeacher, Taught, teach

CHATS = [
    [("user", "Who are you?"), ("assistant", "A cat named Tom.")],
    [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"), ("assistant", "See you soon.")],
    [("user", "Tell me a story"), ("assistant", "Once upon a time there was a little girl. " * 8)],
]


def written(chats: list[list[tuple[str, str]]], file: Path) -> Path:
    records = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def built(model: Path, files: list[Path], longest: int = 512) -> Conversations:
    return Conversations.build(files, load_tokenizer(model, 512), 1, 2, Chats(model), 32, longest)


@pytest.fixture
def conversations(stories_chat_dir: Path, tmp_path: Path) -> Conversations:
    return built(stories_chat_dir, [written(CHATS * 5, tmp_path / "chats.jsonl")])


def sequences(batch_tokens: torch.Tensor) -> list[list[int]]:
    return [row.tolist() for row in batch_tokens]


def test_the_answers_are_learned_and_nothing_else(stories_chat_dir: Path, tmp_path: Path) -> None:
    conversations = built(stories_chat_dir, [written(CHATS[1:2], tmp_path / "chats.jsonl")])
    tokenizer = load_tokenizer(stories_chat_dir, 512)
    learned = tokenizer.decode(conversations.learned_tokens.tolist(), skip_special_tokens=False)
    whole = tokenizer.decode(conversations.tokens.tolist(), skip_special_tokens=False)
    assert "Hello!" in learned
    assert "See you soon." in learned
    for prompt in ("Be kind.", "Hi", "Bye"):
        assert prompt in whole
        assert prompt not in learned


def test_a_position_is_learned_if_the_token_after_it_is_of_an_answer(conversations: Conversations) -> None:
    batch = conversations.batch(0, 0, 4096)
    assert batch.learned_BL is not None
    for row, number in enumerate(batch.numbers):
        first, end = conversations.starts[number : number + 2]
        assert batch.tokens_BL[row, : end - first].tolist() == conversations.tokens[first:end].tolist()
        found = batch.tokens_BL[row, 1:][batch.learned_BL[row, :-1]]
        assert found.tolist() == conversations.tokens[first:end][conversations.learned[first:end]].tolist()
        assert not batch.learned_BL[row, end - first - 1 :].any()


@given(seed=st.integers(0, 5), most_tokens=st.sampled_from([64, 200, 1000, 10_000]))
def test_an_epoch_has_each_sequence_once_and_batches_are_bounded(seed: int, most_tokens: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, 300, size=40)
    starts = np.concatenate(([0], lengths.cumsum()))
    tokens = generator.integers(0, 512, size=starts[-1]).astype(np.uint32)
    conversations = Conversations(tokens, np.ones(len(tokens), np.bool_), starts, "")
    steps = conversations.steps_per_epoch(most_tokens)
    for epoch in (0, 3):
        batches = [conversations.batch(seed, epoch * steps + step, most_tokens) for step in range(steps)]
        assert sorted(number for batch in batches for number in batch.numbers) == list(range(40))
        assert all(batch.tokens_BL.numel() <= most_tokens or len(batch.numbers) == 1 for batch in batches)
        told = [conversations.length_at(seed, epoch * steps + step, most_tokens) for step in range(steps)]
        assert told == [batch.tokens_BL.shape[1] for batch in batches]


def test_long_conversations_are_cut_off_and_texts_among_them_are_divided(
    stories_chat_dir: Path, tmp_path: Path
) -> None:
    file = written(CHATS[2:], tmp_path / "chats.jsonl")
    with file.open("a") as lines:
        lines.write(json.dumps({"text": "Once upon a time there was a dog. " * 12}) + "\n")
    conversations = built(stories_chat_dir, [file], longest=50)
    lengths = np.diff(conversations.starts)
    assert lengths[0] == 50
    assert len(lengths) > 3
    assert all(length <= 32 for length in lengths[1:])
    assert conversations.learned[conversations.starts[1] :].all()


def test_conversations_without_answers_are_refused(stories_chat_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no conversation has an answer of an assistant to learn"):
        built(stories_chat_dir, [written([[("user", "Hi")]], tmp_path / "chats.jsonl")])


def test_stored_outputs_are_those_of_a_forward_and_are_stored_once(
    stories_chat_dir: Path, conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, identity = load_target(stories_chat_dir)
    stored = StoredTeacher.build(target, identity, conversations, (3, 4), "cpu")
    assert stored is not None
    batch = conversations.batch(1, 2, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = teach(target, batch.tokens_BL, (3, 4))
    found = stored(batch)
    assert found.taps_BLND is not None
    assert expected.taps_BLND is not None
    for row, number in enumerate(batch.numbers):
        length = int(np.diff(conversations.starts[number : number + 2])[0])
        pairs = zip(found, expected, strict=True)
        for one, other in ((a[row, :length].float(), b[row, :length].float()) for a, b in pairs):  # type: ignore[index]
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())
    monkeypatch.setattr("spire.training.teacher.teach", None)
    assert StoredTeacher.build(target, identity, conversations, (3, 4), "cpu") is not None


def test_two_runs_that_store_outputs_at_once_do_not_disturb_each_other(
    stories_chat_dir: Path, conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, identity = load_target(stories_chat_dir)
    built: list[StoredTeacher | None] = []

    def outrun(*given: Any) -> Taught:
        monkeypatch.setattr("spire.training.teacher.teach", teach)
        built.append(StoredTeacher.build(target, identity, conversations, (2,), "cpu"))
        return teach(*given)

    monkeypatch.setattr("spire.training.teacher.teach", outrun)
    built.append(StoredTeacher.build(target, identity, conversations, (2,), "cpu"))
    outputs = [stored(conversations.batch(0, 0, 4096)).log_sum_BL for stored in built if stored]
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].any()
    assert len(list(user_cache().glob(f"outputs-{identity}-{conversations.name}-2*"))) == 1


def test_outputs_that_would_fill_the_disk_are_not_stored(
    stories_chat_dir: Path, conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, identity = load_target(stories_chat_dir)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))  # type: ignore[attr-defined]
    assert StoredTeacher.build(target, identity, conversations, (1,), "cpu") is None
    assert not list(user_cache().glob(f"outputs-{identity}-{conversations.name}-1*"))
