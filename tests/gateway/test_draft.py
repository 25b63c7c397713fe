"""Which of the drafts that the verifier tells of a gateway uses, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from gateway.config import GatewayConfig
from gateway.draft import AUTO, ChosenDraft
from spire.v1 import verifier_pb2

ITSELF = verifier_pb2.DraftInfo(draft_id="magicdec", kind="magicdec", model_name="stories", available=True)


def info(draft_id: str, available: bool = True) -> verifier_pb2.DraftInfo:
    return verifier_pb2.DraftInfo(draft_id=draft_id, kind="spire", model_name="small", available=available)


def chosen(draft: ChosenDraft) -> str:
    return draft.info.draft_id if draft.info else ""


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(AUTO, "one"), ("spire", "one"), ("small", "one"), ("one", "one"), ("magicdec", "magicdec")],
)
def test_a_draft_is_chosen_by_kind_name_or_id(wanted: str, expected: str) -> None:
    draft = ChosenDraft(wanted)
    draft.told([ITSELF, info("one")])
    assert (chosen(draft), draft.up, draft.in_verifier) == (expected, True, expected == "magicdec")


@pytest.mark.parametrize("wanted", [AUTO, "elsewhere"])
def test_without_a_fitting_draft_there_is_none(wanted: str) -> None:
    draft = ChosenDraft(wanted)
    draft.told([ITSELF])
    assert (draft.info, draft.up) == (None, False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its `now` is the time."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("gateway.draft.time.monotonic", lambda: clock.now)
    return clock


def test_the_known_draft_is_kept_while_the_verifier_tells_of_it() -> None:
    """What runs follows it alone: it is waited for, also while it cannot be asked."""
    draft = ChosenDraft(AUTO)
    draft.told([info("one")])
    for available in (True, False) * 10:
        draft.told([info("two"), info("one", available), info("three")])
        assert (chosen(draft), draft.up) == ("one", available)


def test_a_reconnected_draft_is_kept_and_a_lost_one_is_replaced(clock: SimpleNamespace) -> None:
    draft = ChosenDraft(AUTO)
    draft.told([info("one")])
    draft.told([info("two")])
    clock.now += 1.0
    assert (chosen(draft), draft.up) == ("one", False)
    draft.told([info("two"), info("one")])
    assert (chosen(draft), draft.up) == ("one", True)
    draft.late()
    draft.told([info("two")])
    clock.now += 2.1
    assert (draft.up, chosen(draft)) == (True, "two"), "and it is not to blame for the other's lateness"


def test_gateways_share_the_drafts_there_are() -> None:
    found = set()
    for _ in range(60):  # one in 10^16 misses one of two
        draft = ChosenDraft(AUTO)
        draft.told([info("one"), info("two")])
        found.add(chosen(draft))
    assert found == {"one", "two"}


def test_a_draft_that_is_away_stays_known() -> None:
    """What starts meanwhile still names it: it follows as soon as it is back."""
    draft = ChosenDraft(AUTO)
    draft.told([info("one")])
    draft.told([ITSELF])
    assert (chosen(draft), draft.up) == ("one", False)
    draft.told([info("one")])
    assert draft.up
    draft.told([])
    assert (chosen(draft), draft.up) == ("one", False)


def test_a_draft_that_was_late_is_left_alone_twice_as_long_each_time(clock: SimpleNamespace) -> None:
    draft = ChosenDraft(AUTO)
    draft.told([info("one")])
    pauses = []
    for _ in range(8):
        draft.late()
        began = clock.now
        while not draft.up:
            clock.now += 0.1
        pauses.append(round(clock.now - began, 1))
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10], abs=0.11)


def test_an_address_is_refused_with_what_to_say_instead() -> None:
    with pytest.raises(ValidationError, match="the verifier knows its drafts, so say auto, off, magicdec"):
        GatewayConfig(draft="127.0.0.1:50052")
