"""Wrong messages, a thousand of them: `make fuzz` sends a hundred thousand."""

from __future__ import annotations

import pytest

from tests.faults.fuzz import fuzzed
from tests.faults.system import System


@pytest.mark.thorough
def test_wrong_messages_past_the_gateway_break_nothing_and_change_no_text(whole: System) -> None:
    verdict = fuzzed(whole, 1000, seed=1)
    assert verdict["broken"] == {}, verdict
    assert verdict["messages"] >= 1000
    assert {"OK", "INVALID_ARGUMENT", "followed"} <= verdict["statuses"].keys(), "streams ended well and badly"


@pytest.mark.thorough
def test_a_service_that_dies_of_a_message_is_seen(whole: System) -> None:
    """A control."""
    with whole.failpoint("brittle"):
        verdict = fuzzed(whole, 1000, seed=1)
    assert "verifier" in verdict["broken"]["dead"]
