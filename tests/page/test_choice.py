"""The page's reading of a chat: each token gets its own letters of the answer, by the bytes that the API tells."""

from __future__ import annotations

import pytest

from tests.page.conftest import Page

_READ = """
const [content, entries, done] = arguments;
import("/static/choice.js").then(({Choice}) => {
    const choice = new Choice();
    const piece = {delta: {content}, token_ids: entries.map((_, at) => at), rounds: [], finish_reason: "stop",
        logprobs: {content: entries.map((bytes) => ({bytes, logprob: -1}))}};
    choice.add({choices: [piece]}, 0);
    done([...choice.news()].map((token) => token.text));
});
"""

FACE = "😀".encode()
TEXTS = [
    pytest.param("one two", [b"one", b" two"], ["one", " two"], id="words"),
    pytest.param("one two", [b" one", b" two"], ["one", " two"], id="a first space that the tokenizer drops"),
    pytest.param("a 😀!", [b"a", b" " + FACE[:2], FACE[2:], b"!"], ["a", " ", "😀", "!"], id="parts of a character"),
    pytest.param("yes", [b"yes", b"<|im_end|>"], ["yes", ""], id="a special token"),
    pytest.param("a\ufffdb", [b"a", b"\xff", b"b"], ["a", "\ufffd", "b"], id="bytes of no character"),
]


@pytest.mark.parametrize(("text", "tokens", "parts"), TEXTS)
def test_each_token_of_a_chat_has_its_own_letters(page: Page, text: str, tokens: list[bytes], parts: list[str]) -> None:
    assert page.driver.execute_async_script(_READ, text, [[*token] for token in tokens]) == parts
