"""Case 34: the verifier dies again and again while requests wait. None that was not being computed is to blame."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.conftest import IMPATIENT, STUCK
from tests.faults.history import Body, Record, stream_into
from tests.faults.system import system
from tests.gateway.conftest import eventually

DEATHS, LIFE_SECONDS = 10, 0.3
WAITING, PLACES = 64, 8


def requests() -> list[Body]:
    always = {"max_tokens": 120, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    prompts = ["Once upon a time" + " there" * (n % 32 + 1) + " was" * (n // 32) for n in range(WAITING)]
    return [{"prompt": prompt} | always for prompt in prompts]


@pytest.mark.fault(34)
@pytest.mark.slow
def test_ten_kills_in_a_row_lose_none_of_64_requests_that_wait(stories_dir: Path, stories_draft_dir: Path) -> None:
    """Each verifier is killed as soon as it serves: in half a minute, where a new one is there after 3 s."""
    options: dict[str, list[str]] = {
        "gateway_options": [*IMPATIENT, "--max-batch", str(PLACES)],
        "verifier_options": [*STUCK, "--max-sequences", str(PLACES)],
    }
    with system(stories_dir, stories_draft_dir, **options) as whole, ThreadPoolExecutor(WAITING) as pool:
        whole.learn(requests())
        records = [Record(body) for body in requests()]
        answers = [pool.submit(stream_into, record, whole.url) for record in records]
        eventually(lambda: whole.metric("gateway", "spire_sequences_now") == WAITING)
        for _ in range(DEATHS):
            whole.verifier.kill()
            whole.revive("verifier")
            eventually(lambda: whole.ready()["status"] != "503")
            time.sleep(LIFE_SECONDS)
        assert whole.metric("gateway", "spire_sequences_now") > PLACES, "nobody waited any more"
        for answer in answers:
            answer.result()
        assert whole.wrong(records) == {}
        assert whole.leaks() == {}
