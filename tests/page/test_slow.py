"""The page in front of a target whose steps take seconds, and whose prompts are read for half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import eventually
from tests.page.conftest import PATIENCE, opened
from tests.services import running
from tests.spire.model.test_large_vocabulary import VOCABULARY, with_vocabulary
from tests.untrained import untrained_draft

SLOW = ["-m", "tests.slow_verifier"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("step", "prefill"), [("0.1", "30"), ("5", "0.1")])
def test_a_slow_target_is_waited_for_and_both_lanes_come_to_their_end(
    driver: Any, stories_dir: Path, tmp_path: Path, step: str, prefill: str
) -> None:
    target = with_vocabulary(stories_dir, VOCABULARY, tmp_path / "target")
    draft = untrained_draft(target, tmp_path / "draft")
    with running(target, draft, verifier=[*SLOW, step, prefill], k=None) as services:
        page = opened(driver, services.url)
        page.load_ready()
        page.ask("Once upon a time", tokens=8, beside=True)
        eventually(lambda: page.text("#plain .facts").startswith("reads the prompt: "), PATIENCE)
        eventually(lambda: not page.busy, 10 * PATIENCE)
        assert page.text("#verdict").startswith("Both texts are equal, in all 8 tokens")
        assert page.complaints() == []
