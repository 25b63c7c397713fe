"""The page at the gateway's `/` in headless Chromium. Skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import eventually
from tests.services import Services, running

# The page waits for the services, and all of them for one another's share of a processor.
PATIENCE = 90.0

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
]


# Keeps what is asked and what is answered, and how many tokens are shown whenever there are more.
_RECORD = """
window.asked = [];
window.heard = [];
window.grown = [];
const real = window.fetch;
window.fetch = async (path, options) => {
    const response = await real(path, options);
    if (options.body) {
        window.asked.push(options.body);
        response.clone().text().then((text) => window.heard.push(text), () => null);
    }
    return response;
};
new MutationObserver(() => window.grown.push(document.querySelectorAll("#drafted .token").length)).observe(
    document.querySelector("#drafted .text"), {childList: true});
"""


def assembled(stream: str) -> dict[str, Any]:
    """The only choice of an answer's events, put together, with the metrics of the last one."""
    whole: dict[str, Any] = {"text": "", "token_ids": [], "rounds": [], "text_offset": []}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            whole["metrics"] = event.get("metrics")
            for piece in event["choices"]:
                whole["text"] += piece["text"] if "text" in piece else piece["delta"]["content"]
                whole["text_offset"] += piece["logprobs"].get("text_offset", [])
                for name in ("token_ids", "rounds"):
                    whole[name] += piece[name]
    return whole


class Page:
    """A loaded page as its user sees it."""

    def __init__(self, driver: Any, url: str):
        self.driver, self.url = driver, url

    def load(self) -> None:
        self.driver.get(self.url)

    def load_ready(self) -> None:
        """Load it and wait until it has met the model and its draft."""
        self.load()
        eventually(lambda: self.state == "ready", PATIENCE)
        self.run(_RECORD)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The completions it has asked for since it was loaded."""
        return [json.loads(body) for body in self.run("return window.asked")]

    @property
    def heard(self) -> list[dict[str, Any]]:
        """What it was answered, of those that are over."""
        eventually(lambda: self.run("return window.heard.length === window.asked.length"), PATIENCE)
        return [assembled(stream) for stream in self.run("return window.heard")]

    def run(self, script: str, *arguments: Any) -> Any:
        """What JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        text: str = self.find(selector).text
        return text

    @property
    def state(self) -> str:
        return self.text("#state")

    @property
    def busy(self) -> bool:
        busy: bool = self.find("#form").get_attribute("aria-busy") == "true"
        return busy

    def fill(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def slide(self, selector: str, value: float) -> None:
        """Move a slider by its keys."""
        slider = self.find(selector)
        while (now := float(slider.get_attribute("value"))) != value:
            slider.send_keys("\ue014" if now < value else "\ue012")  # arrow right, arrow left

    def switch(self, selector: str, on: bool) -> None:
        if self.find(selector).is_selected() != on:
            self.find(selector).click()

    def ask(self, prompt: str, *, tokens: int = 40, seed: int = 2, k: int = 1, beside: bool = False) -> None:
        """Fill the form and start. `beside`: side by side with plain decoding."""
        if not self.find("details").get_property("open"):
            self.find("summary").click()
        if self.find("#beside").is_enabled():
            self.switch("#beside", beside)
        self.fill("#prompt", prompt)
        self.fill("#tokens", str(tokens))
        self.fill("#seed", str(seed))
        if self.find("#depth").is_enabled():
            self.slide("#depth", k)
        self.find("#run").click()

    def complete(self, prompt: str, **options: Any) -> None:
        """Ask, and wait for the end."""
        self.ask(prompt, **options)
        eventually(lambda: not self.busy, PATIENCE)

    def tokens(self, lane: str) -> list[tuple[str, str]]:
        """Kind and text of what a lane shows after the prompt."""
        script = "return [...document.querySelectorAll(arguments[0])].map(t => [t.classList[1], t.textContent])"
        return [(kind, text) for kind, text in self.run(script, f"#{lane} .text .token")]

    def rounds(self, lane: str) -> list[list[str]]:
        """The slots of each round that a lane has drawn, from below."""
        script = """return [...document.querySelectorAll(arguments[0])].map(
            round => [...round.children].map(slot => slot.classList[1]))"""
        rounds: list[list[str]] = self.run(script, f"#{lane} .round")
        return rounds

    def complaints(self) -> list[str]:
        """What the console has got since the last call but notes."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def prefer(self, **features: str) -> None:
        """What the user's system is set to, e.g. prefers_color_scheme="dark"."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """Chromium's driver. Skips where there is none."""
    binary, bridge = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or bridge is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*_FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(bridge))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def opened(driver: Any, url: str) -> Page:
    """A page with nothing left of the one before: 1280 × 900, light, no keys pressed, an empty console."""
    page = Page(driver, f"{url}/")
    driver.get("about:blank")
    page.resize(1280, 900)
    page.prefer(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    page.complaints()
    return page


@pytest.fixture(scope="session")
def services(stories_dir: Path, stories_draft_dir: Path) -> Iterator[Services]:
    with running(stories_dir, stories_draft_dir, k=None) as services:
        yield services


@pytest.fixture
def page(driver: Any, services: Services) -> Iterator[Page]:
    """The page of the services that these tests share; it must not have complained at the end."""
    page = opened(driver, services.url)
    page.load_ready()
    yield page
    assert page.complaints() == []
