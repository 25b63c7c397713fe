"""Text documents: the reader of all files given with --data, for training and measurements.

A .txt file is one document, and so is a line of a .jsonl file: its `text`, or its `messages` rendered by a model's
chat template. `"finish_reason": "length"` beside messages says that the last answer is cut off. Text is UTF-8, with or
without byte order mark. Only \\n ends a JSONL line. Blank documents are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spire.checkpoints.chat_template import read_chat_template
from spire.errors import DataError
from spire.model.directory import is_pointer
from spire.text.chat_messages import plain_message
from spire.text.chat_template import ChatTemplate, TemplateRefusal
from spire.text.kinds import kind_of
from spire.text.text_files import TextFile, Told, is_json_lines, open_unpacked, reading, text_files

# A template that writes more than this is broken: no document is so long.
_MOST_CHARACTERS = 1 << 28
# First bytes of files that are not UTF-8 text, and advice for each.
_BEGINNINGS = {
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    b"\x1f\x8b": "compressed by gzip: give it a name that ends in .gz",
    b"\xfd7zXZ\x00": "compressed by xz: give it a name that ends in .xz",
    b"BZh": "compressed by bzip2: give it a name that ends in .bz2",
    b"PK\x03\x04": "a zip archive: give it a name that ends in .zip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"%PDF": "a PDF: extract its text",
}
_HEAD = 512
_MESSAGES = "messages"
_MOST_KEYS, _LONGEST_KEY = 8, 40


Document = TypeVar("Document")
Used = TypeVar("Used")


class Segment(NamedTuple):
    """A part of a document: of a text, or of a conversation. A draft learns to propose texts and answers."""

    text: str
    learned: bool
    of_text: bool = False


class UnusableLine(Exception):
    """Error for a line that cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Chats:
    """Converter of chat messages to text by the chat template in the directory `model`."""

    model: Path

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template of the model. Raises CheckpointError if the template cannot be read."""
        return ChatTemplate(*read_chat_template(self.model))

    @property
    def key(self) -> str:
        """A hash that identifies the template and its special tokens."""
        return hashlib.sha256(repr((self.template.source, self.template.special_tokens)).encode()).hexdigest()

    def text(self, messages: list[dict[str, Any]]) -> str:
        if not self.template.source:
            raise UnusableLine(f"'messages' need a chat template, and {self.model} has none")
        return self.template.render(messages, _MOST_CHARACTERS, add_generation_prompt=False)

    def segments(self, messages: list[dict[str, Any]], cut_off: bool = False) -> list[Segment]:
        """Return a conversation as alternating prompts and answers, which make up its `text`.

        An answer is what follows the prompt for it, including the template's end of a message. Answers are not learned
        where the template writes them differently later in the conversation, or where they answer nothing. If the last
        answer is `cut_off`, the conversation ends with its last word.
        """
        whole, segments, at = self.text(messages), list[Segment](), 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not number:
                continue
            prompt = self.template.render(messages[:number], _MOST_CHARACTERS, add_generation_prompt=True)
            answered = self.text(messages[: number + 1])
            if whole.startswith(prompt) and whole.startswith(answered) and at <= len(prompt) < len(answered):
                segments += [Segment(whole[at : len(prompt)], False), Segment(whole[len(prompt) : len(answered)], True)]
                at = len(answered)
        if cut_off and segments and at == len(whole):
            return [*segments[:-1], _without_end(segments[-1], messages[-1]["content"])]
        return [*segments, Segment(whole[at:], False)] if at < len(whole) else segments


def _without_end(answer: Segment, content: str) -> Segment:
    """Return an answer without what the template writes behind its content, not learned if that cannot be told."""
    words = content.strip().rstrip("\ufffd")  # half of a character, for a token that is not known
    at = answer.text.find(words)
    return answer._replace(learned=False) if at < 0 or not words else Segment(answer.text[: at + len(words)], True)


def read_documents(files: list[Path], chats: Chats, told: Told = lambda _: None) -> Iterator[str]:
    """Yield all documents of `files` (see find_files) in a fixed order. Each read calls `told` with its byte count.

    Raises DataError naming the file, the line and the key that cannot be used, or the files if they hold no text.
    """
    return _read(files, told, lambda text: text, lambda messages, _: chats.text(messages), lambda text: text)


def read_segments(files: list[Path], chats: Chats, told: Told = lambda _: None) -> Iterator[list[Segment]]:
    """Yield the segments of all documents of `files`. Raises the errors of `read_documents`."""

    def joined(segments: list[Segment]) -> str:
        return "".join(segment.text for segment in segments)

    return _read(files, told, lambda text: [Segment(text, True, of_text=True)], chats.segments, joined)


def hold_chats(files: list[Path]) -> bool:
    """True if the first line of one of these files has `messages`. Archives are not opened."""
    for file in files:
        if is_json_lines(file):
            with open_unpacked(file) as stream:
                first = next((line for line in stream if line.strip()), b"")
            if f'"{_MESSAGES}"'.encode() in first:
                return True
    return False


def _read(
    files: list[Path],
    told: Told,
    of_text: Callable[[str], Document],
    of_messages: Callable[[list[dict[str, Any]], bool], Document],
    text_of: Callable[[Document], str],
) -> Iterator[Document]:
    empty = True
    for file in text_files(files, told):
        with reading(file.name):
            for document in _documents(file, of_text, of_messages, text_of):
                if (text := text_of(document)) and not text.isspace():
                    empty = False
                    yield document
    if empty:
        raise DataError(f"no text found in {', '.join(map(str, files))}")


def _documents(
    file: TextFile,
    of_text: Callable[[str], Document],
    of_messages: Callable[[list[dict[str, Any]], bool], Document],
    text_of: Callable[[Document], str],
) -> Iterator[Document]:
    if not file.json_lines:
        yield of_text(whole_text(file))
        return

    def use(record: dict[str, Any]) -> Document:
        if "text" in record:
            if not isinstance(record["text"], str):
                raise UnusableLine(f"'text' is {kind_of(record['text'])}, not text")
            key, document = "text", of_text(record["text"])
        elif _MESSAGES in record:
            cut_off = record.get("finish_reason") == "length"
            key, document = _MESSAGES, of_messages(messages_of(record), cut_off)
        else:
            raise UnusableLine(f"no 'text' and no 'messages', but {keys_of(record)}")
        check_surrogates(text_of(document), key)
        return document

    yield from each_record(file, use, "'text' or 'messages'")


def whole_text(file: TextFile) -> str:
    """Return the text of a file that is not JSON lines. Raises DataError if it is not UTF-8, or not text."""
    raw = file.stream.read()
    _refuse_other_files(file.name, raw[:_HEAD])
    return decoded(raw, file.name)


def each_record(file: TextFile, use: Callable[[dict[str, Any]], Used], keys: str) -> Iterator[Used]:
    """Yield `use(record)` for the object in each line of JSON lines that is not blank.

    `keys` names the keys that a record should have, for messages. `use` raises UnusableLine or TemplateRefusal for a
    record that it cannot use. Raises DataError naming the file and the line.
    """
    for number, line in enumerate(file.stream, 1):
        if number == 1:
            _refuse_other_files(file.name, line[:_HEAD])
        if not line.strip():
            continue
        try:
            yield use(_record(decoded(line.rstrip(b"\r\n"), file.name, number), keys))
        except (UnusableLine, TemplateRefusal) as error:
            raise DataError(f"{file.name}, line {number}: {' '.join(str(error).split())}") from error


def decoded(raw: bytes, name: str, first_line: int = 1) -> str:
    """Decode UTF-8 without its byte order mark. Raises DataError naming the file, the line and the invalid byte."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at, byte = error.start, raw[error.start]
        line = first_line + raw.count(b"\n", 0, at)
        column = at - raw.rfind(b"\n", 0, at)
        # Not `from error`, which would keep the whole file in memory.
        raise DataError(
            f"{name}, line {line}: byte {column} is 0x{byte:02x}, which is not UTF-8. Convert the file, "
            "for example from Latin-1: iconv -f ISO-8859-1 -t UTF-8"
        ) from None


def _refuse_other_files(name: str, head: bytes) -> None:
    for beginning, what in _BEGINNINGS.items():
        if head.startswith(beginning):
            raise DataError(f"{name} is {what}")
    if is_pointer(head):
        raise DataError(f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull` in its directory")
    if head.count(0) > len(head) // 8:
        raise DataError(f"{name} has zero bytes: it is no text, or UTF-16 (iconv -f UTF-16LE -t UTF-8 converts that)")


def _record(line: str, keys: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UnusableLine(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UnusableLine(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise UnusableLine(f"{kind_of(record)}, not an object with {keys}")
    return record


def check_surrogates(text: str, key: str) -> None:
    """Raise UnusableLine if the text at `key` has an unpaired surrogate, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code, at = ord(text[error.start]), error.start + 1
        raise UnusableLine(f"{key!r} has an unpaired surrogate (\\u{code:04x}) at character {at}") from None


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the `messages` of a record, normalized for a chat template. Raises UnusableLine or TemplateRefusal."""
    if record.get("tools") or record.get("functions"):
        raise UnusableLine("'tools' are not supported: templates get messages alone")
    value = record[_MESSAGES]
    if not isinstance(value, list) or not value:
        found = "empty" if value == [] else kind_of(value)
        raise UnusableLine(f"'messages' is {found}, not a list of messages")
    for at, message in enumerate(value):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            raise UnusableLine(f"{where!r} is {kind_of(message)}, not an object with 'role' and 'content'")
        for name in ("role", "content"):
            if name not in message:
                raise UnusableLine(f"{where!r} has no {name!r}, but {keys_of(message)}")
    return [plain_message(message, f"messages[{at}]") for at, message in enumerate(value)]


def keys_of(record: dict[str, Any]) -> str:
    """Return the first keys of a record as a list for messages."""
    names = [repr(name if len(name) <= _LONGEST_KEY else f"{name[:_LONGEST_KEY]}…") for name in record]
    more = [f"{len(names) - _MOST_KEYS} more"] if len(names) > _MOST_KEYS else []
    return ", ".join([*names[:_MOST_KEYS], *more]) or "nothing"
