"""Documents: what text is in a line, and one line of message for what is none."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from spire.errors import DataError
from spire.text.documents import Chats, Segment, read_documents, read_segments

SECRET = "nobody's business"
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: not text.isspace())


def texts(directory: Path, content: bytes, name: str = "lines.jsonl") -> list[str]:
    file = directory / name
    file.write_bytes(content)
    return list(read_documents([file], Chats(directory)))


def refusal(directory: Path, content: bytes, name: str = "lines.jsonl") -> str:
    """The one line that says what is wrong. No part of what the file holds may be behind it, however it is printed."""
    with pytest.raises(DataError) as refused:
        texts(directory, content, name)
    message = str(refused.value)
    assert message.startswith(str(directory / name))
    assert "\n" not in message
    assert SECRET not in "".join(traceback.format_exception(refused.value))
    seen: BaseException | None = refused.value
    while seen is not None:
        assert SECRET not in repr(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return message


@given(documents=st.lists(WORDS, min_size=1), end=st.sampled_from([b"\n", b"\r\n"]), raw=st.booleans())
def test_lines_end_in_newlines_alone(
    documents: list[str], end: bytes, raw: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Not in U+2028, U+0085 or whatever else Python counts among line ends."""
    content = b"".join(json.dumps({"text": text}, ensure_ascii=not raw).encode() + end for text in documents)
    assert texts(tmp_path_factory.mktemp("lines"), content) == documents


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert texts(tmp_path, mark + b"text", "marked.txt") == ["text"]
    line = mark + b'{"text": "text"}\n'
    assert texts(tmp_path, line + line) == ["text", "text"]


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    assert texts(tmp_path, b'\n{"text": ""}\n \t\n{"text": " \\n"}\n{"text": "a"}\n\n') == ["a"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": 5}', "line 2: 'text' is an integer, not text"),
        ('{"text": null}', "line 2: 'text' is null, not text"),
        ('{"text": ["a"]}', "line 2: 'text' is a list, not text"),
        ('{"text": {"a": 1}}', "line 2: 'text' is an object, not text"),
        ('{"text": true}', "line 2: 'text' is a boolean, not text"),
        ('["a"]', "line 2: a list, not an object with 'text' or 'messages'"),
        ('"a"', "line 2: a string, not an object with 'text' or 'messages'"),
        ('{"prompt": "a", "completion": "b"}', "line 2: no 'text' and no 'messages', but 'prompt', 'completion'"),
        ("{}", "line 2: no 'text' and no 'messages', but nothing"),
        ('{"text": "a\\ud800b"}', "line 2: 'text' has an unpaired surrogate (\\ud800) at character 2"),
        ('{"text": "a"', "line 2: not JSON: Expecting ',' delimiter at column 13"),
        ('{"text": "a"} {"text": "b"}', "line 2: not JSON: Extra data at column 15"),
        ("[" * 100_000, "line 2: not JSON: "),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "line 2: not JSON: "),
        ('{"messages": []}', "line 2: 'messages' is empty, not a list of messages"),
        ('{"messages": "hi"}', "line 2: 'messages' is a string, not a list of messages"),
        ('{"messages": ["hi"]}', "line 2: 'messages[0]' is a string, not an object with 'role' and 'content'"),
        ('{"messages": [{"from": "user"}]}', "line 2: 'messages[0]' has no 'role', but 'from'"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "line 2: messages[0].content is null: it must be",
        ),
        ('{"messages": [{"role": 1, "content": "a"}]}', "line 2: messages[0].role is an integer: it must be a string"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "line 2: messages[0].content[0] is image_url: only text is supported",
        ),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "line 2: 'tools' are not supported"),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}',
            "line 2: messages[0].tool_calls is not supported",
        ),
    ],
)
def test_a_line_that_is_no_document_is_named_with_its_key(line: str, says: str, tmp_path: Path) -> None:
    content = f'{{"text": "{SECRET}"}}\n{line}\n'.encode()
    assert f"lines.jsonl, {says}" in refusal(tmp_path, content)


def test_of_many_keys_and_long_ones_only_some_are_told(tmp_path: Path) -> None:
    message = refusal(tmp_path, json.dumps({f"{at}{'k' * 1000}": 1 for at in range(100)}).encode())
    assert message.endswith(", 92 more")
    assert len(message) < 600


@pytest.mark.parametrize("name", ["book.txt", "lines.jsonl"])
def test_bytes_of_another_encoding_are_told_by_their_place(name: str, tmp_path: Path) -> None:
    first = json.dumps({"text": SECRET}).encode()
    message = refusal(tmp_path, first + b'\n{"text": "caf\xe9"}\n' + first, name)
    assert f"{name}, line 2: byte 14 is 0xe9, which is not UTF-8" in message
    assert "iconv -f ISO-8859-1 -t UTF-8" in message


@pytest.mark.parametrize("name", ["book.txt", "lines.jsonl"])
@pytest.mark.parametrize(
    ("encoding", "says"), [("utf-16", "is UTF-16"), ("utf-16-le", "UTF-16LE"), ("utf-32", "UTF-16")]
)
def test_other_unicode_encodings_are_known(name: str, encoding: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path, f'{{"text": "{SECRET}"}}\n'.encode(encoding), name)


@pytest.mark.parametrize(
    ("beginning", "says"),
    [
        (b"\x1f\x8b\x08", "compressed by gzip: give it a name that ends in .gz"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"%PDF-1.7", "is a PDF"),
    ],
)
def test_other_files_are_known_by_how_they_begin(beginning: bytes, says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path, beginning, "book.txt")


# -- chats -------------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": [{"type": "text", "text": "Me."}]}]
TEMPLATE = """{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system\nhere') }}{% endif %}"""


def with_template(directory: Path, template: str = TEMPLATE) -> None:
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def line(**record: Any) -> bytes:
    return json.dumps(record).encode() + b"\n"


def test_messages_become_text_by_the_model_s_template(tmp_path: Path) -> None:
    with_template(tmp_path)
    content = line(messages=CHAT) + line(text="plain")
    assert texts(tmp_path, content) == ["<s><user>Who?</s><assistant>Me.</s>", "plain"]


def test_a_chat_is_learnt_as_served_ignoring_fields_that_ask_for_nothing(tmp_path: Path) -> None:
    with_template(tmp_path, "{% for m in messages %}{{ m | tojson }}{% endfor %}")
    nothing = {"tool_calls": [], "function_call": None, "refusal": "", "annotations": [{}], "name": None}
    (learnt,) = texts(tmp_path, line(messages=[{**CHAT[1], **nothing, "mood": "kind"}]))
    assert json.loads(learnt) == {"role": "assistant", "content": "Me.", "mood": "kind"}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "tool", "content": "5"}, "role 'tool' is not supported (no tools are)"),
        (
            {"role": "user", "content": []},
            "messages[0].content is a list: it must be a string, or a list of text parts",
        ),
        ({"role": "user", "content": "a", "audio": {"id": "1"}}, "messages[0].audio is not supported"),
    ],
)
def test_a_chat_that_is_not_served_is_not_learnt(message: dict[str, Any], says: str, tmp_path: Path) -> None:
    with_template(tmp_path)
    assert f"line 1: {says}" in refusal(tmp_path, line(messages=[message]))


def test_messages_for_a_model_without_a_template_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, line(text=SECRET) + line(messages=CHAT))
    assert message.endswith(f"lines.jsonl, line 2: 'messages' need a chat template, and {tmp_path} has none")


def test_what_a_template_does_not_take_is_told_with_its_line(tmp_path: Path) -> None:
    with_template(tmp_path)
    message = refusal(tmp_path, line(messages=CHAT) + line(messages=[{"role": "system", "content": SECRET}]))
    assert message.endswith("line 2: the model's chat template does not take these messages: no system here")


def test_what_begins_a_chat_answers_nothing_and_is_not_learned(tmp_path: Path) -> None:
    with_template(tmp_path)
    greeting = {"role": "assistant", "content": "Hello!"}
    whole = "<s><assistant>Hello!</s><user>Who?</s><assistant>"
    segments = Chats(tmp_path).segments([greeting, CHAT[0], {"role": "assistant", "content": "Me."}])
    assert segments == [Segment(whole, False), Segment("Me.</s>", True)]
    assert Chats(tmp_path).segments([greeting]) == [Segment("<s><assistant>Hello!</s>", False)]


def test_of_an_answer_that_was_cut_off_the_end_is_not_learned(tmp_path: Path) -> None:
    with_template(tmp_path)
    cut_off = line(messages=[CHAT[0], {"role": "assistant", "content": "Me, and"}], finish_reason="length")
    (tmp_path / "chats.jsonl").write_bytes(line(messages=CHAT, finish_reason="stop") + cut_off)
    whole, cut = read_segments([tmp_path / "chats.jsonl"], Chats(tmp_path))
    assert whole[-1].text.endswith("</s>")
    assert cut == [whole[0], Segment("Me, and", True)]


@pytest.mark.parametrize(("content", "learned"), [("s", "s"), ("Me \ufffd", "Me "), ("", None), (" \n", None)])
def test_half_a_character_and_a_blank_answer_are_not_learned(content: str, learned: str | None, tmp_path: Path) -> None:
    with_template(tmp_path)
    segments = Chats(tmp_path).segments([CHAT[0], {"role": "assistant", "content": content}], cut_off=True)
    assert [segment.text for segment in segments if segment.learned] == ([] if learned is None else [learned])


def test_where_the_end_of_an_answer_cannot_be_told_it_is_not_learned(tmp_path: Path) -> None:
    with_template(tmp_path, "{% for m in messages %}[{{ m.content | upper }}]{% endfor %}")
    segments = Chats(tmp_path).segments([CHAT[0], {"role": "assistant", "content": "Me"}], cut_off=True)
    assert segments
    assert not any(segment.learned for segment in segments)


def test_a_surrogate_in_messages_is_told(tmp_path: Path) -> None:
    with_template(tmp_path)
    message = refusal(tmp_path, line(messages=[{"role": "user", "content": "\udc00"}]))
    assert "line 1: 'messages' has an unpaired surrogate (\\udc00)" in message


def test_what_is_kept_of_a_corpus_depends_on_the_template(tmp_path: Path) -> None:
    with_template(tmp_path)
    before = Chats(tmp_path).key
    assert Chats(tmp_path).key == before
    with_template(tmp_path, TEMPLATE + " ")
    assert Chats(tmp_path).key != before
