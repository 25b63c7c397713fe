"""The page can be used by whoever comes: by keyboard alone, read aloud, dark, narrow, without motion."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.gateway.conftest import eventually
from tests.marks import thoroughly
from tests.page.conftest import PATIENCE, Page

PROMPT = "Once upon a time"
TAB, ENTER, SPACE, ESCAPE, CONTROL = "\ue004", "\ue007", " ", "\ue00c", "\ue009"
RIGHT, END = "\ue014", "\ue010"
# Of WCAG 2.2, level AA.
LEAST_FOR_TEXT, LEAST_FOR_LARGE_TEXT, LEAST_FOR_SHAPES = 4.5, 3.0, 3.0


class Keyboard:
    """Keys alone: whatever they do, they do to what has the focus."""

    def __init__(self, page: Page):
        self.page = page

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.page.driver).send_keys(*keys).perform()

    def press_with_control(self, key: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.page.driver).key_down(CONTROL).send_keys(key).key_up(CONTROL).perform()

    @property
    def at(self) -> str:
        """What has the focus."""
        at: str = self.page.run("const at = document.activeElement; return at.id || at.classList[0] || at.localName")
        return at

    def tab_to(self, goal: str, most: int = 30) -> list[str]:
        """Press Tab until this has the focus; all stops on the way, each with a ring around it."""
        stops = []
        for _ in range(most):
            self.press(TAB)
            stops.append(self.at)
            ring = self.page.run("const s = getComputedStyle(document.activeElement); return s.outlineStyle")
            assert ring != "none", f"nobody sees that {self.at} has the focus"
            if self.at == goal:
                return stops
        raise AssertionError(f"{goal} is not reached by Tab: {stops}")


@pytest.mark.thorough
def test_it_works_by_keyboard_alone(page: Page) -> None:
    keys = Keyboard(page)
    keys.press(TAB, ENTER)  # the link that skips to the prompt
    assert keys.at == "prompt"
    keys.press_with_control("a")
    keys.press(PROMPT)
    assert page.find("#prompt").get_attribute("value") == PROMPT
    stops = keys.tab_to("beside")
    assert stops == ["run", "example", "example", "example", "beside"]
    keys.press(SPACE)
    assert not page.find("#beside").is_selected()
    keys.press(SPACE)
    assert keys.tab_to("depth") == ["depth"], "speculation cannot be off side by side"
    keys.press(RIGHT, RIGHT)
    assert page.text("#depth-value") == "2"
    keys.press_with_control(ENTER)
    eventually(lambda: page.text("#verdict").startswith("Both texts are equal"), PATIENCE)

    assert keys.tab_to("round")[-3:] == ["small", "small", "round"]  # one stop for all rounds; arrows go on
    first = page.run("return document.activeElement.dataset.round")
    keys.press(RIGHT)
    assert page.run("return document.activeElement.dataset.round") != first
    assert page.all(".token.pointed")
    keys.press(END, TAB)
    assert page.run("return document.activeElement.closest('section').id") == "plain", "Tab leaves the rounds behind"


@pytest.mark.thorough
def test_escape_stops_from_wherever_the_focus_is(page: Page) -> None:
    page.ask(PROMPT, tokens=480, k=1)
    eventually(lambda: len(page.tokens("drafted")) > 3, PATIENCE)
    Keyboard(page).press(ESCAPE)
    eventually(lambda: not page.busy, PATIENCE)
    assert page.text("#verdict") == "Stopped."


def test_whatever_can_have_the_focus_has_a_name_that_is_read_aloud(page: Page) -> None:
    page.complete(PROMPT, tokens=16)
    page.driver.execute_cdp_cmd("Accessibility.enable", {})
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    names = {}
    for node in nodes:
        properties = {found["name"]: found["value"].get("value") for found in node.get("properties", [])}
        if not node.get("ignored") and properties.get("focusable") and node["role"]["value"] != "RootWebArea":
            names.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert {"textbox", "button", "switch", "slider", "combobox", "spinbutton", "link"} <= names.keys()
    assert {role: found for role, found in names.items() if not all(found)} == {}
    assert any(re.fullmatch(r"Round 1: \d drafted, \d accepted, then .*", name) for name in names["button"])
    assert "Speculation" in names["switch"]


# -- colours ---------------------------------------------------------------------------------------------------------

COLOURS = """
const seen = [];
const backgrounds = (node) => {
    const found = [];
    for (; node; node = node.parentElement) found.push(getComputedStyle(node).backgroundColor);
    return found;
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, style = getComputedStyle(node);
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest(":disabled, .skip")) continue;
    seen.push({
        what: `${node.localName}.${node.className} ${walker.currentNode.data.trim().slice(0, 20)}`,
        colour: style.color, backgrounds: backgrounds(node), size: parseFloat(style.fontSize),
    });
}
for (const node of document.querySelectorAll("textarea, select, input:not([type=range], [type=checkbox])")) {
    if (!node.checkVisibility() || node.disabled) continue;
    const style = getComputedStyle(node);
    const colour = node.matches(":placeholder-shown") ? getComputedStyle(node, "::placeholder").color : style.color;
    seen.push({what: node.id, colour, backgrounds: backgrounds(node), size: parseFloat(style.fontSize)});
}
for (const node of document.querySelectorAll(".slot, .dot, input, textarea, select")) {
    if (!node.checkVisibility() || node.disabled || node.type === "range") continue;
    const style = getComputedStyle(node);
    seen.push({
        what: `border of ${node.className || node.id}`, colour: style.borderTopColor,
        backgrounds: backgrounds(node.parentElement), size: 0,
    });
}
return seen;
"""


def channels(colour: str) -> list[float]:
    """Red, green, blue and alpha of what a computed style says."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour)]
    assert colour.startswith("rgb"), colour
    return [*numbers, 1.0][:4]


def luminance(colour: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str, backgrounds: list[str]) -> float:
    """WCAG's ratio of a colour to the first opaque background behind it."""
    behind = next(found for found in map(channels, backgrounds) if found[3] > 0)
    front = channels(colour)
    assert behind[3] == front[3] == 1.0, (colour, backgrounds)
    light, dark = sorted([luminance(front), luminance(behind)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


def too_faint(page: Page) -> dict[str, float]:
    """What cannot be read well, and its ratio."""
    found = page.run(COLOURS)
    assert len(found) > 40
    ratios: list[tuple[dict[str, Any], float]] = [
        (seen, contrast(seen["colour"], seen["backgrounds"])) for seen in found
    ]
    least = {True: LEAST_FOR_LARGE_TEXT, False: LEAST_FOR_TEXT}
    return {
        seen["what"]: round(ratio, 2)
        for seen, ratio in ratios
        if ratio < (LEAST_FOR_SHAPES if seen["size"] == 0 else least[seen["size"] >= 24])
    }


FAINT = {"light": "rgb(175, 175, 175)", "dark": "rgb(70, 70, 70)"}


@pytest.mark.parametrize("scheme", ["light", thoroughly("dark")])
def test_everything_has_enough_contrast(scheme: str, page: Page) -> None:
    page.prefer(prefers_color_scheme=scheme)
    assert too_faint(page) == {}
    page.complete(PROMPT)
    page.run("for (const hidden of document.querySelectorAll('#error, #key-field')) hidden.hidden = false")
    page.run("document.querySelector('#error h2').textContent = document.querySelector('.hint').textContent = 'wrong'")
    page.run("document.querySelector('#state').dataset.state = 'down'")
    page.run("document.activeElement.blur()")
    background = channels(page.run("return getComputedStyle(document.body).backgroundColor"))
    assert (luminance(background) < 0.1) == (scheme == "dark")
    assert too_faint(page) == {}
    # A control: a text that is not much unlike its background is found.
    page.run("document.documentElement.style.setProperty('--quiet', '#888')")
    assert any("help" in what for what in too_faint(page)) or scheme == "dark"
    page.run(
        "document.documentElement.style.setProperty('--accepted', getComputedStyle(document.body).backgroundColor)"
    )
    assert any("slot accepted" in what for what in too_faint(page))


# -- screens and motion ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [320, thoroughly(768), thoroughly(1280)])
def test_nothing_is_wider_than_the_screen(width: int, page: Page) -> None:
    page.resize(width, 700)
    page.complete("Once upon a time thereisawordthatislongerthananyscreeniswide" * 3, tokens=32, beside=True)
    page.run("document.querySelector('details').open = true")
    assert page.run("const page = document.documentElement; return page.scrollWidth <= page.clientWidth")
    assert page.run("return innerWidth") == width
    beyond = page.run(
        "return [...document.querySelectorAll('body *')].filter(n => n.checkVisibility() && !n.matches('.skip')"
        " && n.getBoundingClientRect().right > innerWidth + 1).map(n => n.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    tops = [page.find(f"#{lane}").rect["y"] for lane in ("drafted", "plain")]
    assert (tops[0] == tops[1]) == (width > 700)


@pytest.mark.thorough
@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_nothing_moves_for_whoever_wants_no_motion(motion: str, page: Page) -> None:
    page.prefer(prefers_reduced_motion=motion)
    page.complete(PROMPT, tokens=16)
    moving = page.run(
        "return [...document.querySelectorAll('*')].filter(n => getComputedStyle(n).animationName !== 'none').length"
    )
    assert (moving > 0) == (motion == "no-preference")
