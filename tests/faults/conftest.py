"""One system for all quick faults, and the figures that they report: of each case its tests, and what they measured."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.faults.history import bodies
from tests.faults.system import Endured, System, system

IMPATIENT = ["--k", "4", "--body-deadline", "2"]
STUCK = ["--stuck-seconds", "3", "--lease-seconds", "3", "--drain-seconds", "60"]

_endured: dict[str, list[Endured]] = defaultdict(list)
# By test, the numbers of its cases.
_cases: dict[str, list[int]] = {}
Report = Callable[[str, Endured], None]


@pytest.fixture(scope="session")
def shared(stories_dir: Path, stories_draft_dir: Path) -> Iterator[System]:
    with system(stories_dir, stories_draft_dir, gateway_options=IMPATIENT, verifier_options=STUCK) as whole:
        whole.learn(bodies(4))
        yield whole


@pytest.fixture
def whole(shared: System) -> Iterator[System]:
    """The shared system, as it was before the last fault."""
    yield shared
    shared.heal()


@pytest.fixture(scope="session")
def shared_apart(stories_dir: Path, stories_draft_dir: Path) -> Iterator[System]:
    with system(stories_dir, stories_draft_dir, gateway_options=IMPATIENT, verifier_options=STUCK, apart=True) as whole:
        whole.learn(bodies(4))
        yield whole


@pytest.fixture
def apart(shared_apart: System) -> Iterator[System]:
    """The shared system whose draft is on another host, as it was before the last fault."""
    yield shared_apart
    shared_apart.heal()


@pytest.fixture
def report() -> Report:
    return lambda fault, endured: _endured[fault].append(endured)


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _cases[item.nodeid] = [case for mark in item.iter_markers("fault") for case in mark.args]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One JSON line of figures, also written to the file that SPIRE_FAULTS_REPORT names."""
    if not _endured:
        return
    figures = {fault: _figures(times) for fault, times in sorted(_endured.items())}
    text = json.dumps({"cases": _tests_of_cases(terminalreporter), "figures": figures})
    terminalreporter.write_line(text)
    if file := os.environ.get("SPIRE_FAULTS_REPORT"):
        Path(file).write_text(text + "\n")


def _tests_of_cases(terminalreporter: pytest.TerminalReporter) -> dict[int, dict[str, int]]:
    """By case, how many of its tests passed, failed or were skipped."""
    tests: dict[int, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            for case in _cases.get(report.nodeid, []):
                tests[case][outcome] += 1
    return {case: dict(counts) for case, counts in sorted(tests.items())}


def _figures(times: list[Endured]) -> dict[str, object]:
    """Every request was checked: what failed or differed would have failed the test."""

    def spread(values: list[float]) -> dict[str, float]:
        return {"p50": round(median(values), 4), "max": round(max(values), 4)}

    return {
        "times": len(times),
        "requests": sum(endured.requests for endured in times),
        "detection_seconds": spread([endured.detection for endured in times]),
        "recovery_seconds": spread([endured.recovery for endured in times]),
        "goodput": {
            when: round(median(getattr(endured, f"goodput_{when}") for endured in times), 1)
            for when in ("before", "during", "after")
        },
    }
