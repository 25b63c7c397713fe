"""Cases 1, 2, 4, 5 and 10 to 12: a model service dies, freezes, gets stuck or lies, and no client notices.

The slow ones have quick relatives in tests/gateway/rounds/test_resilience.py, without figures.
"""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spire.lost_device import LOST_DEVICE
from tests.faults.conftest import Report
from tests.faults.failing import GPU_LOST
from tests.faults.history import Load, Record, stream_into
from tests.faults.system import System
from tests.gateway.conftest import eventually
from tests.marks import thoroughly
from tests.services import start


def draft_is_absent(whole: System) -> bool:
    return whole.ready()["draft"] == "absent"


def draft_timeouts(whole: System) -> float:
    return whole.metric("gateway", "spire_fallbacks_total", reason="draft_timeout")


def is_unready(whole: System) -> bool:
    return whole.ready()["status"] == "503"


@pytest.mark.fault(1)
@pytest.mark.slow
def test_a_killed_draft_is_seen_at_once_and_rejoins(whole: System, report: Report) -> None:
    endured = whole.endure(whole.draft.kill, lambda: draft_is_absent(whole), lambda: whole.revive("draft"))
    report("1 draft killed", endured)
    assert endured.goodput_during > 0


@pytest.mark.fault(2)
@pytest.mark.slow
def test_a_frozen_draft_costs_a_round_or_two_and_its_late_answer_is_void(whole: System, report: Report) -> None:
    timeouts: list[float] = []

    def stop() -> None:
        timeouts.append(draft_timeouts(whole))
        whole.draft.process.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        timeouts.append(draft_timeouts(whole))
        whole.draft.process.send_signal(signal.SIGCONT)

    report("2 draft frozen", whole.endure(stop, lambda: draft_is_absent(whole), go_on))
    of_four_streams = timeouts[1] - timeouts[0]
    assert 1 <= of_four_streams <= 2 * 4


@pytest.mark.fault(4)
@pytest.mark.slow
def test_streams_pause_while_the_verifier_is_dead_and_then_continue(whole: System, report: Report) -> None:
    endured = whole.endure(whole.verifier.kill, lambda: is_unready(whole), lambda: whole.revive("verifier"))
    report("4 verifier killed", endured)
    assert endured.goodput_after > 0


@pytest.mark.thorough
@pytest.mark.fault(5)
def test_a_stuck_model_is_unready_though_it_answers_pings_and_then_resumes(whole: System, report: Report) -> None:
    """The verifier of these tests calls a step of 3 s stuck."""
    stuck = whole.failpoint("stuck")
    endured = whole.endure(stuck.__enter__, lambda: is_unready(whole), lambda: stuck.__exit__(None, None, None))
    report("5 model stuck", endured)
    assert 3 <= endured.detection < 10


@pytest.mark.thorough
@pytest.mark.fault(5, 20)
@pytest.mark.parametrize("signals", [1, thoroughly(2)])
def test_a_stuck_model_does_not_keep_its_verifier_from_ending(stories_dir: Path, tmp_path: Path, signals: int) -> None:
    """By itself within seconds, and at once when it is told again."""
    failing = ["-m", "tests.faults.failing", str(tmp_path), "verifier_service", "--model", str(stories_dir)]
    verifier = start([*failing, "--port", "0", "--dtype", "float32"], tmp_path)
    (tmp_path / "stuck").touch()
    began = time.monotonic()
    for _ in range(signals):
        verifier.process.send_signal(signal.SIGTERM)
        time.sleep(2)  # for the second to find that the first was heard
    assert verifier.process.wait(20) == 3
    assert (time.monotonic() - began < 8) == (signals > 1)
    assert "the model is stuck" in verifier.log.read_text()


@pytest.mark.thorough
@pytest.mark.fault(11)
def test_numbers_gone_bad_fail_their_request_clearly_and_no_other(whole: System) -> None:
    victim = Record({"prompt": "Once", "temperature": 1, "seed": 13, "max_tokens": 200, "return_token_ids": True})
    with whole.failpoint("nan"), ThreadPoolExecutor(1) as pool:
        others = pool.submit(whole.ask)
        stream_into(victim, whole.url)
        assert whole.wrong(others.result()) == {}
    assert json.loads(victim.error)["code"] == "not_finite"
    assert victim.ends == 1
    assert whole.metric("verifier", "spire_verifier_refused_items_total", code="data_loss") > 0
    assert whole.leaks() == {}


def test_a_step_that_fails_is_computed_again_and_no_client_notices(whole: System) -> None:
    replays = whole.metric("gateway", "spire_replays_total")
    with Load(whole.url, [record.body for record in whole.expected.values()]) as load:
        eventually(lambda: load.flowing)
        (whole.directory / "falters").touch()
    assert whole.wrong(load.records) == {}
    assert whole.metric("gateway", "spire_replays_total") > replays
    assert whole.leaks() == {}


@pytest.mark.thorough
@pytest.mark.gpu
@pytest.mark.fault(1, 4)
@pytest.mark.parametrize(("switch", "name"), [("gone", "draft"), thoroughly("lost", "verifier")])
def test_a_service_that_has_lost_its_gpu_ends_and_no_client_notices(whole: System, switch: str, name: str) -> None:
    """It would fail every step from then on, and be healthy all the while."""
    service = getattr(whole, name)
    with Load(whole.url, [record.body for record in whole.expected.values()]) as load:
        eventually(lambda: load.flowing)
        (whole.directory / switch).touch()
        assert service.process.wait(60) == LOST_DEVICE
        whole.revive(name)
    assert whole.wrong(load.records) == {}
    (told,) = [line for line in service.log.read_text().splitlines() if "the GPU is lost" in line]
    assert json.loads(told)["error"] == GPU_LOST


@pytest.mark.thorough
def test_if_every_step_fails_a_request_is_given_up_without_library_words(whole: System) -> None:
    victim = Record({"prompt": "Once", "max_tokens": 200, "return_token_ids": True})
    with whole.failpoint("broken"):
        stream_into(victim, whole.url)
    assert "verifier_lost" in victim.error
    assert "words of a library" not in victim.error
    assert whole.wrong(whole.ask()) == {}
    assert whole.leaks() == {}


@pytest.mark.fault(10, 12)
@pytest.mark.parametrize(
    ("failpoint", "fault"),
    [thoroughly("lies", "12 draft lies"), ("nonsense", "10 draft sends nonsense")],
    ids=["lies", "nonsense"],
)
def test_whatever_a_draft_says_no_token_changes(whole: System, report: Report, failpoint: str, fault: str) -> None:
    switch = whole.directory / failpoint
    endured = whole.endure(switch.touch, lambda: True, lambda: (time.sleep(1), switch.unlink()))
    report(fault, endured)
    assert endured.requests >= len(whole.expected)
    assert endured.goodput_during > 0
