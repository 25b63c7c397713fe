"""A model without a draft speculates: its verifier is the draft too, and no other process is there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gateway.api.test_rest import PROMPTS
from tests.gateway.conftest import OFF, Api, eventually
from tests.gateway.rounds.test_resilience import LONG, PROMPT, in_flight, plain, revive
from tests.services import Services, running

SLOW_AT_DRAFTING = ["-m", "tests.slowly_drafting_verifier"]


@pytest.fixture(scope="module")
def services(stories_dir: Path) -> Iterator[Services]:
    """A window that most prompts exceed."""
    with running(stories_dir, "magicdec", verifier_options=["--self-window", "16"]) as system:
        yield system


@pytest.fixture(scope="module")
def api(services: Services) -> Api:
    return Api(services.url)


def test_greedy_text_is_the_targets_own_whether_guesses_are_right_or_wrong(api: Api) -> None:
    request = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        drafted = list(pool.map(lambda prompt: api.complete(prompt, **request), PROMPTS))
        plainly = list(pool.map(lambda prompt: api.complete(prompt, **request, speculation=OFF), PROMPTS))
    assert [answer["choices"] for answer in drafted] == [answer["choices"] for answer in plainly]
    details = [answer["usage"]["completion_tokens_details"] for answer in drafted]
    accepted, rejected = (sum(d[f"{what}_prediction_tokens"] for d in details) for what in ("accepted", "rejected"))
    assert accepted > rejected > 0


def test_guesses_are_waited_for_as_verifications_are(stories_dir: Path) -> None:
    """A draft of its own that took as long would be given up in every round."""
    options = {"verifier": SLOW_AT_DRAFTING, "gateway_options": ["--draft-deadline", "0.2"]}
    with running(stories_dir, "magicdec", **options, patient=False) as system:
        api = Api(system.url)
        assert api.complete(PROMPT, max_tokens=10, temperature=0, ignore_eos=True)["choices"]
        assert api.metric("spire_drafts_total") > 0
        for reason in ("draft_timeout", "draft_lost", "draft_error"):
            assert api.metric("spire_fallbacks_total", reason=reason) == 0


def test_the_kind_of_draft_is_shown(api: Api, stories_dir: Path) -> None:
    ready = {"status": "ready", "model": stories_dir.name, "verifier": "connected"}
    ready |= {"max_context": 512, "max_sequences": 64}
    ready |= {"draft": "connected", "draft_kind": "magicdec"}
    found = api.ready()
    assert ready.items() <= found.items()
    assert all(found[name] for name in ("device", "dtype", "kernels"))
    assert api.metric("spire_draft_info", kind="magicdec", name=stories_dir.name) == 1
    assert api.metric("spire_draft_state_bytes_per_sequence") == 0
    (card,) = api.http.get("/v1/models").json()["data"]
    assert card["draft"]["kind"] == "magicdec"
    assert card["draft"]["bytes_per_sequence"] is None
    assert api.complete(PROMPT, max_tokens=4, speculation={"draft": "magicdec"})["choices"]


@pytest.mark.thorough
def test_a_verifier_that_dies_and_returns_drafts_again_at_once(services: Services, api: Api) -> None:
    expected = plain(api, requests=2)
    with in_flight(api, requests=2) as futures:
        services.verifier.kill()
        eventually(lambda: api.http.get("/ready").status_code == 503)
        services.verifier = revive(services.verifier, services.directory)
        try:
            eventually(lambda: api.http.get("/ready").is_success and api.ready()["draft"] == "connected")
            assert [future.result()["choices"] for future in futures] == expected
            before = api.metric("spire_draft_tokens_total")
            assert api.complete(PROMPT, **LONG)["choices"] == expected[0]
            assert api.metric("spire_draft_tokens_total") > before
        finally:
            services.verifier.process.terminate()
