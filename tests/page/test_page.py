"""The live page does what it shows: its tokens, rounds and figures are those of the API, for whoever looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from spire.service.keys import create_key
from tests.gateway.conftest import Api, eventually
from tests.page.conftest import PATIENCE, Page, opened
from tests.services import Service, Services, running, start

PROMPT = "Once upon a time"
KINDS = {"accepted", "corrected", "bonus", "alone"}


def kinds_of(choice: dict[str, Any]) -> list[str]:
    """What the page should make of each token, told by the rounds alone."""
    kinds = ["alone"] * len(choice["token_ids"])
    for round_ in choice["rounds"]:
        own = "alone" if not round_["drafted"] else "bonus" if round_["accepted"] == round_["drafted"] else "corrected"
        for at in range(round_["tokens"]):
            kinds[round_["begin"] + at] = "accepted" if at < round_["accepted"] else own
    return kinds


# -- what it shows ---------------------------------------------------------------------------------------------------


def test_a_prompt_streams_as_tokens_coloured_by_who_chose_them(page: Page, services: Services) -> None:
    page.complete(PROMPT)
    (choice,) = page.heard
    shown = page.tokens("drafted")
    assert page.text("#drafted .text .prompt") == PROMPT
    assert "".join(text for _, text in shown) == choice["text"] != ""
    begins = choice["text_offset"]
    ends = [*begins[1:], len(choice["text"])]
    visible = [kind for kind, begin, end in zip(kinds_of(choice), begins, ends, strict=True) if end > begin]
    assert [kind for kind, _ in shown] == visible
    assert {kind for kind, _ in shown} == KINDS
    assert len({*page.run("return window.grown")}) > len(choice["rounds"]) / 3, "the text came in few pieces"
    asked = {"max_tokens": 40, "seed": 2, "speculation": {"draft": "off", "rule": "invariant"}}
    assert Api(services.url).text(PROMPT, **asked) == choice["text"]


@pytest.mark.thorough
def test_kinds_of_tokens_differ_by_colour_and_by_line(page: Page) -> None:
    page.complete(PROMPT)
    styles = {
        kind: page.run(
            "const s = getComputedStyle(document.querySelector(arguments[0])); return [s.color, s.textDecoration]",
            f"#drafted .text .token.{kind}",
        )
        for kind in KINDS
    }
    assert len({colour for colour, _ in styles.values()}) == len(KINDS)
    assert len({line.split("rgb")[0] for _, line in styles.values()}) == len(KINDS)


def test_each_round_is_drawn_with_the_slots_it_had(page: Page) -> None:
    page.complete(PROMPT, k=4)
    rounds = page.heard[0]["rounds"]
    assert max(round_["drafted"] for round_ in rounds) == 4
    drawn = page.rounds("drafted")
    assert len(drawn) == len(rounds)
    for slots, round_ in zip(drawn, rounds, strict=True):
        own = [slot for slot in slots if slot not in ("accepted", "rejected")]
        assert slots.count("accepted") == round_["accepted"]
        assert len(slots) == max(round_["drafted"], round_["tokens"])
        assert len(own) == (round_["tokens"] > round_["accepted"])
    label = page.find("#drafted .round").get_attribute("aria-label")
    if rounds[0]["drafted"]:
        assert label.startswith(f"Round 1: {rounds[0]['drafted']} drafted, {rounds[0]['accepted']} accepted, then ")


@pytest.mark.thorough
def test_the_figures_are_those_of_the_api(page: Page) -> None:
    page.complete(PROMPT)
    metrics = page.heard[0]["metrics"]
    figures = metrics["speculative_decoding"]
    assert float(page.text("#tau")) == pytest.approx(figures["mean_acceptance_length"], abs=0.005)
    assert float(page.text("#rate")) == pytest.approx(1000 / metrics["mean_itl_ms"], abs=0.51)
    expected = f"Done: {figures['num_accepted_draft_tokens']} of {figures['num_draft_tokens']} draft tokens accepted."
    assert page.text("#verdict") == expected


@pytest.mark.thorough
def test_a_multiplier_is_shown_while_the_gateway_chooses_k(page: Page, services: Services) -> None:
    page.complete(PROMPT, k=0)
    assert page.text("#depth-value") == "auto"
    assert "by the gateway’s rounds" in page.text("#gain-name")
    shown = float(page.text("#gain").removesuffix(" ×"))
    assert shown == pytest.approx(Api(services.url).metric("spire_multiplier_measured"), abs=0.006)


@pytest.mark.thorough
def test_fixed_k_multiplier_is_over_the_last_plain_run_of_same_sampling(page: Page) -> None:
    page.complete(PROMPT, k=4)
    assert page.text("#gain") == "–"
    page.find("#speculation").click()
    page.complete(PROMPT)
    page.find("#speculation").click()
    page.complete(PROMPT, k=4)
    assert page.text("#gain-name") == "multiplier over the last plain run"
    _, plain, drafted = (choice["metrics"]["mean_itl_ms"] for choice in page.heard)
    assert float(page.text("#gain").removesuffix(" ×")) == pytest.approx(plain / drafted, abs=0.006)
    page.slide("#temperature", 0)
    page.complete(PROMPT, k=4)
    assert page.text("#gain") == "–"


@pytest.mark.thorough
def test_pointing_at_a_round_marks_the_tokens_it_gave(page: Page) -> None:
    page.complete(PROMPT)
    rounds = page.heard[0]["rounds"]
    at = next(at for at, round_ in enumerate(rounds) if round_["accepted"])
    page.run("document.querySelector(arguments[0]).focus()", f'.round[data-round="{at}"]')
    marked = page.run("return [...document.querySelectorAll('.token.pointed')].map(t => t.dataset.round)")
    assert marked == [str(at)] * rounds[at]["tokens"]


@pytest.mark.thorough
def test_without_speculation_it_decodes_plainly(page: Page, services: Services) -> None:
    page.switch("#beside", False)
    page.find("#speculation").click()
    drafts = Api(services.url).metric("spire_drafts_total")
    page.complete(PROMPT)
    assert not page.find("#drafted").is_displayed()
    assert {kind for kind, _ in page.tokens("plain")} == {"alone"}
    assert page.rounds("plain") == [["alone"]] * 39
    assert Api(services.url).metric("spire_drafts_total") == drafts
    page.find("#speculation").click()
    page.complete(PROMPT)
    assert page.find("#drafted").is_displayed()
    assert Api(services.url).metric("spire_drafts_total") > drafts


def test_side_by_side_both_texts_are_equal_and_it_says_so(page: Page) -> None:
    page.complete(PROMPT, beside=True)
    assert page.text("#verdict").startswith("Both texts are equal, in all 40 tokens")
    drafted, plain = page.tokens("drafted"), page.tokens("plain")
    assert "".join(text for _, text in drafted) == "".join(text for _, text in plain) != ""
    assert {kind for kind, _ in drafted} == KINDS
    assert {kind for kind, _ in plain} == {"alone"}
    assert not page.find("#rule").is_enabled()
    assert page.find("#rule").get_attribute("value") == "invariant"
    metrics = [choice["metrics"] for choice in page.heard]
    metrics.sort(key=lambda figures: figures["speculative_decoding"]["num_draft_tokens"])
    plain_ms, drafted_ms = (figures["mean_itl_ms"] for figures in metrics)
    assert "measured here" in page.text("#gain-name")
    assert float(page.text("#gain").removesuffix(" ×")) == pytest.approx(plain_ms / drafted_ms, abs=0.006)


@pytest.mark.thorough
def test_side_by_side_it_says_where_texts_part(page: Page) -> None:
    """A control for the one above: other tokens come from plain decoding."""
    page.run("""
        const real = window.fetch;
        window.fetch = (path, options) => {
            const body = options.body && JSON.parse(options.body);
            if (body?.speculation.draft === "off") options = {...options, body: JSON.stringify({...body, seed: 3})};
            return real(path, options);
        };
    """)
    page.complete(PROMPT, beside=True)
    assert page.text("#verdict").startswith("The texts part at token ")


@pytest.mark.thorough
def test_the_rule_that_is_chosen_is_the_rule_that_is_used(page: Page) -> None:
    texts = {}
    page.switch("#beside", False)
    for rule in ("invariant", "rejection"):
        if not page.find("details").get_property("open"):
            page.find("summary").click()
        page.find("#rule").send_keys(rule)
        page.complete(PROMPT)
        assert page.asked[-1]["speculation"] == {"k": 1, "rule": rule}
        texts[rule] = "".join(text for _, text in page.tokens("drafted"))
    assert texts["invariant"] != texts["rejection"]


def test_stopping_ends_the_text_and_frees_the_sequence(page: Page, services: Services) -> None:
    page.ask(PROMPT, tokens=480, k=1)
    eventually(lambda: len(page.tokens("drafted")) > 3, PATIENCE)
    page.find("#stop").click()
    eventually(lambda: not page.busy, PATIENCE)
    assert page.text("#verdict") == "Stopped."
    eventually(lambda: Api(services.url).metric("spire_sequences_now") == 0, PATIENCE)
    assert len(page.tokens("drafted")) < 480


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mortal(stories_dir: Any, stories_draft_dir: Any) -> Iterator[Services]:
    """Services whose verifier a test may kill."""
    with running(stories_dir, stories_draft_dir, gateway_options=["--verifier-patience", "200"]) as services:
        yield services


def restarted(services: Services) -> Service:
    """The verifier again, on its port."""
    command = services.verifier.command.copy()
    command[command.index("--port") + 1] = services.verifier.address.rsplit(":", 1)[1]
    return start(command, services.directory)


@pytest.mark.thorough
def test_a_killed_verifier_is_told_of_and_noticed_when_it_is_back(driver: Any, mortal: Services) -> None:
    page = opened(driver, mortal.url)
    page.load_ready()
    assert page.text("#depth-value") == "4", "this gateway's depth is fixed"
    page.ask(PROMPT, tokens=480, k=1)
    eventually(lambda: len(page.tokens("drafted")) > 3, PATIENCE)
    mortal.verifier.kill()
    eventually(lambda: page.state == "the verifier is down: what runs waits for it", PATIENCE)
    page.find("#stop").click()
    eventually(lambda: not page.busy, PATIENCE)

    page.find("#run").click()
    eventually(lambda: page.find("#error").is_displayed(), PATIENCE)
    assert page.find("#error").get_attribute("role") == "alert"
    assert page.text("#error h2") == "The verifier is down"
    assert "no verifier is connected" in page.text("#error")
    assert not page.busy

    back = restarted(mortal)
    try:
        eventually(lambda: page.state == "ready" and not page.find("#error").is_displayed(), PATIENCE)
        page.complete(PROMPT, tokens=16)
        assert len(page.tokens("drafted")) == 16
    finally:
        back.stop()
    noises = [line for line in page.complaints() if "Failed to load resource" not in line]
    assert noises == []


def test_a_page_that_has_never_met_a_verifier_says_that_there_is_none(driver: Any, tmp_path: Any) -> None:
    peers = ["--verifier", "127.0.0.1:9", "--startup-patience", "0"]
    gateway = start(["-m", "gateway", *peers, "--port", "0"], tmp_path)
    try:
        page = opened(driver, f"http://{gateway.address}")
        page.load()
        eventually(lambda: page.state == "the verifier is down", PATIENCE)
        page.find("#run").click()
        eventually(lambda: page.find("#error").is_displayed(), PATIENCE)
        assert page.text("#error h2") == "The verifier is down"
        assert not page.find("#figures").is_displayed()
        assert not page.find("#lanes").is_displayed()
    finally:
        gateway.stop()


def test_a_gateway_that_is_gone_is_told_of(driver: Any, stories_dir: Any) -> None:
    with running(stories_dir) as services:
        page = opened(driver, services.url)
        page.load()
        eventually(lambda: page.state == "ready, without a draft", PATIENCE)
        assert not page.find("#speculation").is_enabled()
        page.complete(PROMPT, tokens=8)
        assert page.rounds("plain") == [["alone"]] * 7
        services.gateway.kill()
        eventually(lambda: page.state == "the gateway does not answer", PATIENCE)
        page.find("#run").click()
        eventually(lambda: page.find("#error").is_displayed(), PATIENCE)
        assert page.text("#error h2") == "The gateway does not answer"


@pytest.mark.thorough
def test_a_prompt_that_takes_long_to_read_is_told_of_until_the_first_token(driver: Any, stories_dir: Any) -> None:
    with running(stories_dir, verifier=["-m", "tests.slow_verifier", "0.02", "4"]) as services:
        page = opened(driver, services.url)
        page.load()
        eventually(lambda: page.state == "ready, without a draft", PATIENCE)
        page.ask(PROMPT, tokens=8)
        eventually(lambda: page.text("#plain .facts").startswith("reads the prompt: "), PATIENCE)
        eventually(lambda: page.text("#plain .facts").startswith("8 tokens"), PATIENCE)
        eventually(lambda: not page.busy, PATIENCE)
        assert page.text("#verdict") == "Done."
        assert not page.find("#error").is_displayed()


@pytest.mark.thorough
def test_what_the_api_refuses_is_told_in_its_words(page: Page) -> None:
    page.ask("word " * 600)
    eventually(lambda: page.find("#error").is_displayed(), PATIENCE)
    assert "512" in page.text("#error")
    (complaint,) = page.complaints()
    assert "400" in complaint
    page.complete(PROMPT)
    assert not page.find("#error").is_displayed()


def test_a_field_that_is_wrong_is_shown_where_it_is(page: Page) -> None:
    """Also inside of the closed details."""
    page.run("document.querySelector('#tokens').value = 0")
    page.find("#run").click()
    eventually(lambda: page.find("#tokens").is_displayed(), PATIENCE)
    assert not page.busy
    assert page.run("return document.activeElement.id") == "tokens"


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_key_is_asked_for_and_kept_nowhere_but_in_the_page(
    driver: Any, stories_dir: Any, stories_draft_dir: Any, tmp_path: Any
) -> None:
    key = create_key("alice", tmp_path / "keys")
    with running(stories_dir, stories_draft_dir, gateway_options=["--keys", str(tmp_path / "keys")]) as services:
        page = opened(driver, services.url)
        page.load()
        eventually(lambda: page.find("#key").is_displayed(), PATIENCE)
        assert page.run("return document.activeElement.id") == "key"
        assert page.text("#error h2") == "An API key is needed"
        assert page.state == "an API key is needed"
        assert not page.find("#gateway-links").is_displayed(), "a browser that follows a link sends no key"
        page.find("#key").send_keys("wrong\ue004")
        eventually(lambda: "not known here" in page.text("#error"), PATIENCE)
        page.fill("#key", key + "\ue004")
        eventually(lambda: page.state == "ready", PATIENCE)
        assert not page.find("#error").is_displayed()
        page.complete(PROMPT, tokens=8)
        assert len(page.tokens("drafted")) == 8

        kept = page.run("return [document.cookie, location.href, {...localStorage}, {...sessionStorage}, name]")
        assert kept == ["", f"{services.url}/", {}, {}, ""]
        assert key not in page.run("return document.documentElement.outerHTML")
        page.load()
        eventually(lambda: page.find("#key").is_displayed(), PATIENCE)
        assert page.find("#key").get_attribute("value") == ""


# -- what it loads ---------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere_and_no_inline_script_would_run(page: Page, services: Services) -> None:
    page.complete(PROMPT, tokens=4)
    loaded = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert any(name.endswith("/static/lane.js") for name in loaded)
    assert [name for name in loaded if not name.startswith(f"{services.url}/")] == []
    policy = httpx.get(services.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page.run("""
        const script = document.createElement("script");
        script.textContent = "window.inline = true";
        document.body.append(script);
        const image = document.createElement("img");
        image.src = "http://127.0.0.1:9/elsewhere.png";
        document.body.append(image);
    """)
    refused: list[str] = []

    def both_refused() -> bool:
        refused.extend(page.complaints())
        return len(refused) >= 2

    eventually(both_refused, PATIENCE)
    assert all("Content Security Policy" in complaint for complaint in refused)
    assert page.run("return window.inline") is None
