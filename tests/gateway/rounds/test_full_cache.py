"""A cache for a tenth of what is asked: first tokens come in the order in which requests came."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest

from tests.gateway.conftest import Api
from tests.services import running

PAGES, PAGE = 4, 256 * 1280  # bytes of 256 positions of stories260K in float32


@pytest.mark.fault(29)
def test_under_steady_arrivals_a_full_cache_serves_who_came_first(stories_dir: Path) -> None:
    """Forty requests of a page and more, memory for four pages."""
    options = ["--cache-gb", str(PAGES * PAGE / 1e9 + 1e-6)]
    with running(stories_dir, verifier_options=options) as system:
        api = Api(system.url)
        first_tokens: dict[int, float] = {}

        def ask(number: int) -> list[int]:
            prompt = [300 + number, *range(3, 150)]
            body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
            ids: list[int] = []
            with api.http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        first_tokens.setdefault(number, time.monotonic())
                        ids.append(number)
            return ids

        with ThreadPoolExecutor(40) as pool:
            work = []
            for number in range(40):
                work.append(pool.submit(ask, number))
                time.sleep(0.05)
            assert all(one.result() for one in work)
        # Two whose first tokens come together may be read in either order.
        overtaken = [
            (earlier, later)
            for earlier, later in combinations(range(40), 2)
            if first_tokens[later] < first_tokens[earlier] - 0.1
        ]
        assert not overtaken
