"""`make pictures`: those of the page in docs/, taken anew of SmolLM2 with its draft on this machine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from spire.checkpoints.smollm2 import smollm2
from tests.page.conftest import browser, opened
from tests.paths import ROOT
from tests.services import running

PICTURES = {"light": "page.png", "dark": "page-dark.png"}
PROMPT = "A pen costs 3 dollars and a book costs 12 dollars. How much do 4 pens and 2 books cost together?"
TOKENS = 96
# Runs before the pictures, by which the gateway finds out from where drafting pays.
WARM_RUNS = 4


def take() -> None:
    with (
        TemporaryDirectory() as profile,
        browser(Path(profile)) as driver,
        running(smollm2(), ROOT / "models" / "smollm2-draft", dtype="auto", k=None) as services,
    ):
        page = opened(driver, services.url)
        for seed in range(WARM_RUNS):
            page.load_ready()
            page.complete(PROMPT, tokens=TOKENS, seed=seed, k=0, beside=True)
        for scheme, name in PICTURES.items():
            page.resize(1200, 900)
            page.prefer(prefers_color_scheme=scheme)
            page.load_ready()
            page.complete(PROMPT, tokens=TOKENS, seed=1, k=4, beside=True)
            page.find("summary").click()
            page.run("window.scrollTo(0, 0); document.activeElement.blur()")
            page.resize(1200, page.run("return document.documentElement.scrollHeight"))
            driver.save_screenshot(str(ROOT / "docs" / name))
            print(ROOT / "docs" / name, page.text("#rate"), "tokens/s,", page.text("#gain"))


if __name__ == "__main__":
    take()
