"""A corpus: its tokens are those of its documents, and what is kept of it is used for the same files alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from spire.checkpoints.tokenizer import load_tokenizer
from spire.cli import app
from spire.errors import SpireError
from spire.text.documents import Chats
from spire.training.corpus import TokenStream

START, END = 1, 2


def built(model: Path, data: Path) -> TokenStream:
    return TokenStream.build([data], load_tokenizer(model), START, END, Chats(model))


def test_chats_are_learnt_as_the_model_s_template_writes_them(stories_chat_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon a time"}]
    file.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"text": "The end"}))
    tokens = built(stories_chat_dir, file).tokens
    tokenizer = load_tokenizer(stories_chat_dir)
    texts = ["<s>user: Hi\nassistant: Once upon a time\n", "The end"]
    expected = [id_ for text in texts for id_ in [*tokenizer.encode(text, add_special_tokens=False).ids, END]]
    assert tokens.tolist() == expected
    assert tokens[0] == START


def test_a_file_that_changed_in_a_directory_is_read_again(stories_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "books" / "a.txt"
    file.parent.mkdir()
    file.write_text("Once upon a time")
    before = built(stories_dir, file.parent)
    file.write_text("Once upon a tree")
    os.utime(file, (1, 1))
    after = built(stories_dir, file.parent)
    assert before.name != after.name
    assert not np.array_equal(before.tokens, after.tokens)
    assert np.array_equal(built(stories_dir, file.parent).tokens, after.tokens)


def test_data_that_is_not_there_is_told_before_the_target_is_loaded(stories_dir: Path, tmp_path: Path) -> None:
    """This target has no weights, and they are not missed first."""
    (tmp_path / "config.json").write_bytes((stories_dir / "config.json").read_bytes())
    options = ["--target", str(tmp_path), "--data", str(tmp_path / "absent.txt"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["train", "draft", *options])
    assert f"{tmp_path / 'absent.txt'} does not exist" in str(result.exception)


@pytest.mark.parametrize("what", ["draft", "target"])
def test_chats_for_a_model_without_a_template_are_refused_before_training(
    what: str, stories_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}))
    out = tmp_path / "out"
    options = {"draft": ["--target", str(stories_dir)], "target": []}[what]
    result = CliRunner().invoke(app, ["train", what, "--data", str(file), "--out", str(out), *options])
    assert isinstance(result.exception, SpireError)
    model = {"draft": stories_dir, "target": out}[what]
    assert str(result.exception) == f"{file}, line 1: 'messages' need a chat template, and {model} has none"
