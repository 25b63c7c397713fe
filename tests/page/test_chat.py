"""The page in front of a model with a chat template: it sends the whole conversation, and keeps it nowhere else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import eventually
from tests.page.conftest import PATIENCE, Page, opened
from tests.page.test_page import KINDS, kinds_of
from tests.page.test_snippet import copied
from tests.services import Services, running

QUESTIONS = ["where is Lily", "and the dog"]


@pytest.fixture(scope="module")
def talking(stories_chat_dir: Path, stories_draft_dir: Path) -> Iterator[Services]:
    with running(stories_chat_dir, stories_draft_dir, k=None) as services:
        yield services


@pytest.fixture
def chat(driver: Any, talking: Services) -> Iterator[Page]:
    page = opened(driver, talking.url)
    page.load_ready()
    yield page
    assert page.complaints() == []


def answer(page: Page, lane: str = "drafted") -> str:
    return "".join(text for _, text in page.tokens(lane))


def history(page: Page) -> list[list[str]]:
    """Role and text of the messages that the page shows above the last answer."""
    script = "return [...document.querySelectorAll('#history li')].map(m => [m.className, m.lastChild.textContent])"
    return [list(message) for message in page.run(script)]


def test_a_chat_model_is_asked_questions(chat: Page) -> None:
    assert chat.text("label[for=prompt]") == "Message"
    assert chat.text("#run").startswith("Send")
    assert [example.text[-1] for example in chat.all(".example")] == ["?", "?", "."]
    chat.find(".example").click()
    eventually(lambda: not chat.busy, PATIENCE)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert [asked["messages"] for asked in chat.asked] == [question] * 2


def test_an_answer_is_coloured_by_who_chose_its_tokens(chat: Page) -> None:
    chat.complete(QUESTIONS[0])
    (heard,) = chat.heard
    assert answer(chat) == heard["text"] != ""
    assert chat.text("#drafted .text .prompt") == QUESTIONS[0]
    kinds = [kind for kind, _ in chat.tokens("drafted")]
    assert {*kinds} == KINDS
    assert kinds == kinds_of(heard)[: len(kinds)], "tokens at the end may have no text"


def test_each_message_is_sent_with_all_before_it(chat: Page) -> None:
    chat.complete(QUESTIONS[0], tokens=12)
    first = answer(chat)
    assert chat.find("#prompt").get_attribute("value") == ""
    assert history(chat) == []
    chat.complete(QUESTIONS[1], tokens=12, beside=True)
    before = [["user", QUESTIONS[0]], ["assistant", first]]
    assert history(chat) == before
    messages = [{"role": role, "content": text} for role, text in [*before, ["user", QUESTIONS[1]]]]
    assert [asked["messages"] for asked in chat.asked[1:]] == [messages] * 2
    assert chat.text("#verdict").startswith("Both texts are equal")
    assert answer(chat) == answer(chat, "plain")


def test_a_new_chat_forgets_the_one_before(chat: Page) -> None:
    assert not chat.find("#anew").is_displayed()
    for question in QUESTIONS:
        chat.complete(question, tokens=8)
    chat.find("#anew").click()
    assert not chat.find("#history").is_displayed()
    assert not chat.find("#lanes").is_displayed()
    assert chat.run("return document.activeElement.id") == "prompt"
    chat.complete(QUESTIONS[1], tokens=8)
    assert chat.asked[-1]["messages"] == [{"role": "user", "content": QUESTIONS[1]}]


def test_a_question_without_an_answer_is_not_part_of_the_chat(chat: Page) -> None:
    chat.complete("word " * 600)
    assert chat.find("#error").is_displayed()
    assert chat.find("#prompt").get_attribute("value").startswith("word word")
    assert len(chat.complaints()) == 1
    chat.complete(QUESTIONS[0], tokens=8)
    assert len(chat.asked[-1]["messages"]) == 1


def test_an_answer_that_was_stopped_is_part_of_the_chat(chat: Page) -> None:
    chat.ask(QUESTIONS[0], tokens=400)
    eventually(lambda: len(chat.tokens("drafted")) > 3, PATIENCE)
    chat.find("#stop").click()
    eventually(lambda: not chat.busy, PATIENCE)
    stopped = answer(chat)
    chat.complete(QUESTIONS[1], tokens=8)
    assert history(chat) == [["user", QUESTIONS[0]], ["assistant", stopped]]


def test_a_conversation_is_kept_in_the_page_alone(chat: Page) -> None:
    chat.complete(QUESTIONS[0], tokens=8)
    assert chat.run("return [document.cookie, {...localStorage}, {...sessionStorage}]") == ["", {}, {}]
    chat.load_ready()
    chat.complete(QUESTIONS[1], tokens=8)
    assert len(chat.asked[-1]["messages"]) == 1


def test_a_copied_chat_repeats_the_whole_conversation(chat: Page) -> None:
    for question in QUESTIONS:
        chat.complete(question, tokens=12)
    done = subprocess.run(["bash", "-c", copied(chat, "curl")], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == answer(chat)


def test_the_conversation_can_be_read_by_keyboard(chat: Page) -> None:
    for question in QUESTIONS:
        chat.complete(question, tokens=8)
    focusable = chat.run("const h = document.querySelector('#history'); h.focus(); return document.activeElement === h")
    assert focusable
    assert chat.find("#history").get_attribute("aria-label")
