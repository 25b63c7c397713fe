"""Prompts in files, for models to answer: chats, questions, and lines of text.

A line of a .jsonl file is an object with `messages` (the assistant's last messages are no part of the prompt), or with
the text of a user's message as `prompt` or `question`. A line of a .txt file is a user's message. Forms of files,
encoding and errors are those of `spire.text.documents`; other keys of an object are ignored, and so are blank lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spire.errors import DataError
from spire.text.documents import UnusableLine, check_surrogates, each_record, keys_of, messages_of, whole_text
from spire.text.kinds import kind_of
from spire.text.text_files import TextFile, Told, reading, text_files

_TEXTS = ("prompt", "question")
_KEYS = "'messages', 'prompt' or 'question'"


@dataclass(frozen=True)
class Prompt:
    """A conversation for the assistant to answer, as messages for a chat template, and its answer if that is known."""

    messages: list[dict[str, Any]]
    answer: dict[str, Any] | None = None

    @classmethod
    def of_user(cls, text: str) -> Prompt:
        """Return the conversation that consists of one message of a user."""
        return cls([{"role": "user", "content": text}])

    @property
    def text(self) -> str | None:
        """The text of a prompt that is one message of a user; None for any other conversation."""
        return self.messages[0]["content"] if [message["role"] for message in self.messages] == ["user"] else None

    @property
    def normalized(self) -> tuple[str, ...]:
        """Roles and texts of the messages without regard to case and white space: equal for prompts that say the same.

        Other fields of a message are not compared.
        """
        return tuple(normalized(message[name]) for message in self.messages for name in ("role", "content"))


def normalized(text: str) -> str:
    """Return a text without regard to case, and with single blanks for white space."""
    return " ".join(text.casefold().split())


def read_prompts(files: Iterable[Path], told: Told = lambda _: None) -> Iterator[Prompt]:
    """Yield the prompts of `files` (see find_files) in a fixed order. Each read calls `told` with its byte count.

    Raises DataError naming the file, the line and the key that cannot be used, or the files if they hold no prompt.
    """
    files, empty = list(files), True
    for file in text_files(files, told):
        with reading(file.name):
            for prompt in _prompts_in(file):
                empty = False
                yield prompt
    if empty:
        raise DataError(f"no prompt found in {', '.join(map(str, files))}")


def _prompts_in(file: TextFile) -> Iterator[Prompt]:
    if file.json_lines:
        return each_record(file, _prompt_of, _KEYS)
    lines = whole_text(file).split("\n")
    return (Prompt.of_user(line.strip()) for line in lines if line.strip())


def _prompt_of(record: dict[str, Any]) -> Prompt:
    key = next((name for name in ("messages", *_TEXTS) if name in record), None)
    if key is None:
        raise UnusableLine(f"no {_KEYS}, but {keys_of(record)}")
    if key == "messages":
        prompt = _unanswered(messages_of(record))
    elif isinstance(text := record[key], str) and text.strip():
        prompt = Prompt.of_user(text)
    else:
        raise UnusableLine(f"{key!r} is {'blank' if isinstance(text, str) else kind_of(text)}, not text")
    for message in prompt.messages:
        check_surrogates(message["content"], key)
    return prompt


def _unanswered(messages: list[dict[str, Any]]) -> Prompt:
    count = len(messages)
    while count and messages[count - 1]["role"] == "assistant":
        count -= 1
    if not count:
        raise UnusableLine("'messages' has none but the assistant's: there is nothing to answer")
    return Prompt(messages[:count], messages[count] if count < len(messages) else None)
