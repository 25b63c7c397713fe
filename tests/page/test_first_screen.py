"""What the page offers before anybody has typed: examples, what is served, side by side, a new seed for each run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Api, eventually
from tests.page.conftest import PATIENCE, Page, opened
from tests.services import Services, running

PROMPT = "Once upon a time"


def facts(page: Page) -> dict[str, str]:
    """What the page says is served, by name."""
    rows = "return [...document.querySelectorAll('#facts > div')].map(row => [...row.children].map(c => c.textContent))"
    return dict(page.run(rows))


def card(services: Services) -> dict[str, Any]:
    (model,) = Api(services.url).http.get("/v1/models").json()["data"]
    return dict(model)


def test_it_shows_no_figures_and_no_empty_text_before_the_first_run(page: Page) -> None:
    for selector in ("#figures", "#lanes", "#again"):
        assert not page.find(selector).is_displayed()
    assert page.find("#reading h2").is_displayed()
    page.complete(PROMPT, tokens=8)
    for selector in ("#figures", "#lanes", "#again"):
        assert page.find(selector).is_displayed()
    assert not page.find("#reading h2").is_displayed()


def test_an_example_is_completed_at_one_click(page: Page) -> None:
    examples = page.all(".example")
    assert len(examples) == 3
    assert page.find("#prompt").get_attribute("value") == examples[0].text
    examples[1].click()
    eventually(lambda: page.text("#verdict").startswith("Both texts are equal"), PATIENCE)
    assert {asked["prompt"] for asked in page.asked} == {examples[1].text}
    assert page.text("#drafted .text").startswith(examples[1].text)


def test_what_is_served_is_told_as_the_api_tells_it(page: Page, services: Services) -> None:
    ready, draft = Api(services.url).ready(), card(services)["draft"]
    told = facts(page)
    assert told["Model"] == f"260 K parameters, float32, on {ready['device']}"
    assert told["Context"] == "512 tokens, 64 requests at once"
    assert told["Kernels"] == ready["kernels"]
    assert told["Draft"] == f"spire, k up to {draft['max_k']}, chosen for each round"
    assert told["Draft’s memory"] == f"{draft['bytes_per_sequence']:,} bytes a sequence, whatever its context"


def test_it_tells_from_where_drafting_pays_once_that_is_measured(
    driver: Any, stories_dir: Any, stories_draft_dir: Any
) -> None:
    with running(stories_dir, stories_draft_dir, k=None) as services:
        page = opened(driver, services.url)
        page.load_ready()
        assert facts(page)["Drafting pays"] == "not measured yet"
        while not card(services)["draft"]["gains"]:
            page.complete(PROMPT, tokens=200, k=0, beside=True)
        eventually(lambda: facts(page)["Drafting pays"] != "not measured yet", PATIENCE)
        gains = card(services)["draft"]["gains"]
        paying = [gain["context"] for gain in gains if gain["multiplier"] > 1]
        if paying:
            assert facts(page)["Drafting pays"].startswith(f"1 request: from {min(paying)} tokens on, up to ")
        else:
            most = max(gain["context"] for gain in gains)
            assert facts(page)["Drafting pays"] == f"1 request: not up to {most} tokens"


def test_each_run_has_a_new_seed_until_one_is_pinned(page: Page) -> None:
    for pinned in (False, True):
        page.switch("#pinned", pinned)
        for _ in range(2):
            page.find(".example").click()
            eventually(lambda: not page.busy, PATIENCE)
            assert page.text("#used-seed") == str(page.asked[-1]["seed"])
    seeds = [asked["seed"] for asked in page.asked[::2]]  # of both lanes each
    assert seeds == [asked["seed"] for asked in page.asked[1::2]]
    assert len({*seeds[:2]}) == 2
    assert seeds[1:] == [seeds[1]] * 3


def test_a_seed_that_is_typed_is_pinned(page: Page) -> None:
    page.fill("#seed", "7")
    assert page.find("#pinned").is_selected()
    page.find("#seed").send_keys("\ue003")  # backspace
    assert not page.find("#pinned").is_selected()


def test_k_goes_up_to_what_model_and_draft_take(page: Page, services: Services) -> None:
    most = card(services)["draft"]["max_k"]
    assert most > 8
    page.complete(PROMPT, k=most)
    assert page.text("#depth-value") == str(most)
    assert max(round_["drafted"] for round_ in page.heard[0]["rounds"]) == most


def test_the_beginning_of_a_long_text_stays_in_view(page: Page) -> None:
    page.complete(PROMPT, tokens=400, beside=True)
    box = page.run("""
        const box = document.querySelector("#drafted .text");
        return [box.scrollTop, box.scrollHeight, box.clientHeight];
    """)
    assert box[:2] == [0, box[2]]
    assert box[2] > 440


def test_it_links_to_the_metrics_and_the_manual_of_the_api(page: Page) -> None:
    for link in page.all("#gateway-links a"):
        assert Api(page.url).http.get(link.get_attribute("href")).status_code == 200
    assert [link.text for link in page.all("#links a") if link.is_displayed()] == ["API", "OpenAPI", "Metrics"]


def test_it_links_to_the_boards_that_the_operator_names(driver: Any, stories_dir: Any, stories_draft_dir: Any) -> None:
    options = ["--boards", "https://boards.example/d/spire"]
    with running(stories_dir, stories_draft_dir, gateway_options=options) as services:
        page = opened(driver, services.url)
        page.load_ready()
        assert [link.text for link in page.all("#links a")] == ["Boards", "API", "OpenAPI", "Metrics"]
        assert page.find("#boards").get_attribute("href") == "https://boards.example/d/spire"


@pytest.mark.thorough
def test_with_a_fixed_k_no_gain_is_claimed(driver: Any, stories_dir: Any, stories_draft_dir: Any) -> None:
    with running(stories_dir, stories_draft_dir, k=3) as services:
        page = opened(driver, services.url)
        page.load_ready()
        page.complete(PROMPT, tokens=100, k=0, beside=True)
        assert facts(page)["Draft"] == "spire, k = 3"
        assert facts(page)["Drafting pays"] == "not compared, because k is fixed"
