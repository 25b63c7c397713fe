"""What the page copies repeats the request: as a shell command, and as a program in Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gateway.conftest import eventually
from tests.page.conftest import PATIENCE, Page

# Quotes of every kind, and letters beyond ASCII.
PROMPT = 'It\'s "Lily" \\ $HOME `pwd`\n"""né"""'

_CATCH = """
const clipboard = {writeText: async (text) => { window.copied = text; }};
Object.defineProperty(navigator, "clipboard", {value: clipboard, configurable: true});
"""
_CATCH_WITHOUT_INTERFACE = """
Object.defineProperty(navigator, "clipboard", {value: undefined, configurable: true});
document.execCommand = () => {
    window.copied = document.activeElement.value;
    return true;
};
"""


def copied(page: Page, kind: str, catch: str = _CATCH) -> str:
    """What a click on a button of this kind copies."""
    page.run(catch)
    page.find(f'[data-copy="{kind}"]').click()
    eventually(lambda: page.text("#copied") == "Copied.", PATIENCE)
    text: str = page.run("return window.copied")
    return text


def shown(page: Page) -> str:
    return "".join(text for _, text in page.tokens("drafted"))


def test_the_copied_command_repeats_the_request(page: Page) -> None:
    page.complete(PROMPT, tokens=24)
    command = copied(page, "curl")
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"] == shown(page)


def test_the_copied_program_repeats_the_request(page: Page) -> None:
    page.complete(PROMPT, tokens=24)
    done = subprocess.run([sys.executable, "-c", copied(page, "python")], capture_output=True, text=True, check=True)
    assert done.stdout == shown(page) + "\n"


def test_copies_are_of_the_request_whose_text_is_shown(page: Page) -> None:
    page.complete(PROMPT, tokens=4)
    page.fill("#prompt", "another")
    body = json.loads(copied(page, "curl").split("-d '")[1].removesuffix("'").replace("'\\''", "'"))
    assert body.items() >= {"prompt": PROMPT, "seed": 2, "speculation": {"k": 1, "rule": "invariant"}}.items()


@pytest.mark.thorough
def test_it_copies_where_the_browser_has_no_clipboard_interface(page: Page) -> None:
    page.complete(PROMPT, tokens=4)
    assert copied(page, "curl", _CATCH_WITHOUT_INTERFACE).startswith("curl http://")
    assert page.run("return document.activeElement.dataset.copy") == "curl"


def test_a_key_is_read_from_the_environment_and_not_copied(page: Page) -> None:
    page.run("document.querySelector('#key-field').hidden = false")
    page.fill("#key", "spire-secret\ue004")
    page.complete(PROMPT, tokens=4)
    for kind in ("curl", "python"):
        text = copied(page, kind)
        assert "SPIRE_API_KEY" in text
        assert "spire-secret" not in text
