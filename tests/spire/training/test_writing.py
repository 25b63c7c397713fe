"""Text for training by a served model: each prompt is answered once, whatever broke off the run before."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spire.cli import app
from spire.errors import DataError, SpireError
from spire.text.prompts import Prompt, read_prompts
from spire.training.writing import Writing, write_chats
from tests.services import running

QUESTIONS = ["Who are you?", "Tell me a story", "Where is the cat?", "tell  me a STORY"]


@pytest.fixture(scope="module")
def url(stories_chat_dir: Path) -> Iterator[str]:
    with running(stories_chat_dir) as system:
        yield system.url


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
    return file


def chats(file: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


def answered(file: Path) -> list[list[dict[str, Any]]]:
    return [messages for messages in chats(file) if messages[-1]["role"] == "assistant"]


def asked(file: Path) -> list[str]:
    return sorted(messages[0]["content"] for messages in chats(file))


def writing(url: str) -> Writing:
    return Writing(url, concurrency=2, max_tokens=400)


def test_each_question_is_answered_once(url: str, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    done = write_chats(out, read_prompts([questions]), None, writing(url))
    assert (done.chats + done.in_circles, done.known) == (3, 1)
    assert asked(out) == sorted(QUESTIONS[:3])
    assert len(answered(out)) == done.chats
    assert done.tokens > 0


def test_a_run_that_was_broken_off_is_continued(url: str, questions: Path, tmp_path: Path) -> None:
    """Also one that was killed within a line."""
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_chats(whole, read_prompts([questions]), None, writing(url))
    lines = whole.read_text().splitlines(keepends=True)
    broken.write_text(lines[0] + lines[1][:20])
    write_chats(broken, read_prompts([questions]), None, writing(url))
    assert sorted(chats(broken), key=str) == sorted(chats(whole), key=str)


def test_answers_that_are_cut_off_are_marked_and_not_tried_again(url: str, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    done = write_chats(out, read_prompts([questions]), None, Writing(url, max_tokens=1))
    assert (done.chats, done.cut_off, done.in_circles) == (3, 3, 0)
    assert [json.loads(line)["finish_reason"] for line in out.read_text().splitlines()] == ["length"] * 3
    assert len(answered(out)) == 3
    again = write_chats(out, read_prompts([questions]), None, Writing(url, max_tokens=1))
    assert (again.tokens, again.known) == (0, 4)


def test_answers_that_went_round_in_circles_are_left_out(
    url: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spire.training.writing.goes_in_circles", lambda text: True)
    out = tmp_path / "chats.jsonl"
    done = write_chats(out, read_prompts([questions]), None, Writing(url, max_tokens=1))
    assert (done.chats, done.cut_off, done.in_circles) == (0, 0, 3)
    assert [[message["role"] for message in messages] for messages in chats(out)] == [["user"]] * 3


def test_a_prompt_that_is_refused_costs_no_other(url: str, tmp_path: Path) -> None:
    prompts = [Prompt.of_user("word " * 600), Prompt.of_user("Hi")]
    done = write_chats(tmp_path / "chats.jsonl", prompts, None, writing(url))
    assert (done.refused, done.chats + done.in_circles) == (1, 1)


def test_the_model_writes_prompts_behind_the_users_tag(url: str, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    done = write_chats(out, None, 2, writing(url))
    assert done.prompts == 2
    assert all(messages[0]["content"].strip() for messages in chats(out))
    assert len(set(asked(out))) == len(asked(out))


def test_the_prompts_that_the_model_writes_begin_as_asked(url: str, tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    write_chats(out, None, 3, replace(writing(url), begin="Once upon"))
    assert all(text.startswith("Once upon") for text in asked(out))


def test_a_model_that_writes_no_usable_prompt_is_not_asked_forever(url: str, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        write_chats(tmp_path / "chats.jsonl", None, 2, Writing(url, max_tokens=1))
    assert caught.group_contains(SpireError, match="were blank, cut off or known: give it prompts")


def test_a_file_of_something_else_is_not_appended_to(url: str, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    with pytest.raises(DataError, match=r"notes\.txt, line 1 is no chat: name another file"):
        write_chats(out, read_prompts([questions]), None, writing(url))
    assert out.read_text() == "my notes\n"


@pytest.mark.parametrize(
    "content", ['{"a": 1}', "my notes", '{"messages": [{"role": "user", "content": null}]}\n', '{"messages": []}']
)
def test_a_file_of_something_else_is_not_emptied(content: str, tmp_path: Path) -> None:
    out = tmp_path / "notes.json"
    out.write_text(content)
    with pytest.raises(DataError, match=r"notes\.json, line 1 is no chat"):
        write_chats(out, [Prompt.of_user("Hi")], None, writing("http://127.0.0.1:9"))
    assert out.read_text() == content


def test_a_last_chat_without_a_newline_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    out.write_text(json.dumps(chat))
    done = write_chats(out, [Prompt.of_user("hi")], None, writing("http://127.0.0.1:9"))
    assert done.known == 1
    assert out.read_text() == json.dumps(chat) + "\n"


@pytest.mark.parametrize("name", [".", "no/such/directory"])
def test_a_file_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path / name} cannot be written"):
        write_chats(tmp_path / name, [Prompt.of_user("Hi")], None, writing("http://127.0.0.1:9"))


def test_a_gateway_that_is_not_there_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        write_chats(tmp_path / "chats.jsonl", None, 2, Writing("http://127.0.0.1:9", concurrency=32))
    assert caught.group_contains(SpireError, match="no gateway")
    del caught
    gc.collect()
    assert caplog.messages == []


def test_the_command_says_what_is_missing_and_what_it_wrote(url: str, questions: Path, tmp_path: Path) -> None:
    def command(*arguments: str) -> tuple[str, BaseException | None]:
        done = CliRunner().invoke(app, ["write", "--out", str(tmp_path / "chats.jsonl"), *arguments])
        return done.stdout, done.exception

    assert "how many chats" in str(command()[1])
    assert "leave it out" in str(command("--prompts", str(questions), "--begin", "Tell me")[1])
    assert "--prompts takes" in str(command("--prompts", str(tmp_path / "absent.jsonl"))[1])
    refused = command("--prompts", str(questions), "--url", "http://127.0.0.1:9")[1]
    assert "no gateway at http://127.0.0.1:9" in str(refused)
    printed, error = command("--prompts", str(questions), "--url", url, "--json", "--max-tokens", "400")
    assert error is None
    figures = json.loads(printed)
    assert figures["chats"] + figures["in_circles"] == 3
    assert len(answered(tmp_path / "chats.jsonl")) == figures["chats"]


# --- prompts in files -------------------------------------------------------------------------------------------------


def test_prompts_are_read_from_messages_questions_and_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "one"}\n\n{"question": "two", "answer": "2"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"},'
        ' {"role": "assistant", "content": "gone"}]}\n'
    )
    (tmp_path / "b.txt").write_text("four\n\n  five \n")
    found = list(read_prompts([tmp_path / "a.jsonl", tmp_path / "b.txt"]))
    assert [prompt.text for prompt in found] == ["one", "two", None, "four", "five"]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]
    assert found[2] == Prompt(messages, answer={"role": "assistant", "content": "gone"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"answer": "4"}', "line 1: no 'messages', 'prompt' or 'question', but 'answer'"),
        ('{"prompt": 4}', "line 1: 'prompt' is an integer, not text"),
        ('{"prompt": " "}', "line 1: 'prompt' is blank, not text"),
        ('{"prompt": "\\ud800"}', "unpaired surrogate"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer"),
        ("[]", "not an object with 'messages', 'prompt' or 'question'"),
    ],
)
def test_a_prompt_that_is_none_is_named_by_its_line(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(DataError, match=says):
        list(read_prompts([tmp_path / "a.jsonl"]))
