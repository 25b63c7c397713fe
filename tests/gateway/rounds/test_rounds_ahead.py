"""Rounds are sent before the one before them is answered, where that pays, and change no text."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.proxy import proxied
from tests.gateway.conftest import Api
from tests.services import Service, Services, running, start, wait_until_connected

LATENCY = 0.1
CORES = len(os.sched_getaffinity(0))
OFF: dict[str, Any] = {"speculation": {"draft": "off"}, "return_token_ids": True}


@pytest.fixture(scope="module")
def filling(stories_dir: Path) -> Iterator[Services]:
    """A system whose verifier computes on every core, so that little is sent ahead."""
    with running(stories_dir, verifier_options=["--threads", str(CORES)]) as system:
        yield system


def seconds_of(verifier: Service, directory: Path, tokens: int, requests: int = 1) -> float:
    """Of so many tokens of each request through a wire on which a round trip takes two latencies."""
    return far_away(verifier, directory, tokens, requests=requests)[0]


def far_away(
    verifier: Service, directory: Path, tokens: int, *options: str, requests: int = 1
) -> tuple[float, dict[str, Any]]:
    """Seconds and an answer of requests at once to a gateway with these options, so far from the verifier."""
    with proxied(verifier.address) as wire:
        command = ["-m", "gateway", "--verifier", wire.address, "--port", "0"]
        gateway = start([*command, *(options or ("--draft", "off"))], directory)
        try:
            wait_until_connected(gateway, {"verifier", "draft"} if options else {"verifier"})
            api = Api(f"http://{gateway.address}")
            api.complete("Once", max_tokens=2)
            wire.latency = LATENCY
            body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_rounds": True}
            began = time.monotonic()
            with ThreadPoolExecutor(requests) as pool:
                answers = list(pool.map(lambda _: api.complete("Once", **body), range(requests)))
            return time.monotonic() - began, answers[0]
        finally:
            gateway.kill()


@pytest.mark.skipif(CORES < 2, reason="one thread fills one core")
def test_two_plain_rounds_share_a_round_trip_if_the_verifier_spares_a_core(services: Services, tmp_path: Path) -> None:
    assert seconds_of(services.verifier, tmp_path, tokens=30) < 29 * 2 * LATENCY


@pytest.mark.thorough
def test_two_small_plain_rounds_share_a_round_trip_if_all_cores_are_busy(filling: Services, tmp_path: Path) -> None:
    assert seconds_of(filling.verifier, tmp_path, tokens=30) < 29 * 2 * LATENCY


@pytest.mark.thorough
def test_where_it_fills_them_rounds_of_many_wait_for_their_answers(filling: Services, tmp_path: Path) -> None:
    assert seconds_of(filling.verifier, tmp_path, tokens=15, requests=6) >= 14 * 2 * LATENCY


def test_two_drafted_rounds_share_a_round_trip(services: Services, tmp_path: Path) -> None:
    """The verifier asks the draft: the gateway's distance lies between none of the steps."""
    assert services.draft is not None
    options = ("--draft", "auto", "--k", "4", "--draft-deadline", "20")
    seconds, answer = far_away(services.verifier, tmp_path, 50, *options)
    rounds = answer["choices"][0]["rounds"]
    assert sum(round_["drafted"] > 0 for round_ in rounds) > 0.8 * len(rounds)
    assert seconds < (len(rounds) - 1) * 2 * LATENCY  # which is what it takes if each waits for the one before


def drafted_texts(api: Api) -> list[list[int]]:
    """As `texts`, with guesses of all depths."""
    bodies = [
        {
            "max_tokens": length,
            "seed": seed,
            "temperature": 1.0,
            "speculation": {"k": seed % 6, "rule": "invariant"},
            **({"stop": ["the"]} if seed % 3 == 0 else {}),
        }
        for seed, length in enumerate((1, 2, 3, 5, 8, 13, 40, 41, 90, 91, 120, 121))
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        work = [pool.submit(api.complete, "Once upon a time", **body, return_token_ids=True) for body in bodies]
        return [future.result()["choices"][0]["token_ids"] for future in work]


@pytest.mark.thorough
def test_what_was_ordered_beyond_a_text_s_end_is_no_part_of_it(services: Services) -> None:
    api = Api(services.url)
    assert drafted_texts(api) == texts(api)


def texts(api: Api) -> list[list[int]]:
    """Requests of all lengths at once: some end at a token of their own choosing, some by a stop sequence."""
    bodies = [
        {"max_tokens": length, "seed": seed, "temperature": 1.0, **({"stop": ["the"]} if seed % 3 == 0 else {})}
        for seed, length in enumerate((1, 2, 3, 5, 8, 13, 40, 41, 90, 91, 120, 121))
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        work = [pool.submit(api.complete, "Once upon a time", **body, **OFF) for body in bodies]
        return [future.result()["choices"][0]["token_ids"] for future in work]


def test_the_text_is_the_same_whether_or_not_rounds_are_sent_ahead(services: Services, filling: Services) -> None:
    ahead, one_by_one = (texts(Api(system.url)) for system in (services, filling))
    assert ahead == one_by_one
    assert [len(tokens) for tokens in ahead][:3] == [1, 2, 3]
