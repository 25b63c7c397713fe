"""Memory for a fraction of what is asked: every request is answered, with the text it would have had alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Api, eventually
from tests.services import running

LONG: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPTS = ["Once upon a time" + " there" * index for index in range(4)]


@pytest.mark.thorough
@pytest.mark.fault(19)
def test_more_requests_than_memory_all_end_with_the_text_they_have_alone(
    stories_dir: Path, stories_draft_dir: Path
) -> None:
    # Five pages of 256 positions, of 327,680 bytes each: two of these sequences, when they have grown.
    with running(stories_dir, stories_draft_dir, verifier_options=["--cache-gb", "0.00165"]) as system:
        api = Api(system.url)
        eventually(lambda: api.ready().get("draft") == "connected")
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: api.complete(prompt, **LONG)["choices"], PROMPTS))
        assert api.metric("spire_replays_total") > 0
        alone = [api.complete(prompt, **LONG, speculation={"draft": "off"})["choices"] for prompt in PROMPTS]
        assert [choice["token_ids"] for (choice,) in together] == [choice["token_ids"] for (choice,) in alone]


def test_a_prompt_that_repeats_says_how_much_of_it_was_not_computed(api: Api) -> None:
    prompt = "Once upon a time there was a little dog. " * 12
    first, second = (api.complete(prompt, max_tokens=8, temperature=0, seed=1) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    usage = second["usage"]
    assert usage["prompt_tokens"] - 70 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_who_has_another_salt_cannot_tell_that_a_prompt_was_seen_before(api: Api) -> None:
    request: dict[str, Any] = {"prompt": "The cat sat on the mat and slept. " * 12, "max_tokens": 8, "temperature": 0}
    answers = [api.complete(**request, **salt) for salt in ({"cache_salt": "hers"}, {"cache_salt": "his"}, {})]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 0, 0]
    again = api.complete(**request, cache_salt="hers")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert len({answer["choices"][0]["text"] for answer in [*answers, again]}) == 1
