"""`make gpu` without a GPU: every part runs on the CPU with tiny shapes, and what goes wrong is a finding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.gpu import __main__ as gpu
from experiments.gpu.expectation import floor_seconds, step_seconds
from experiments.gpu.findings import Finding, Findings
from experiments.gpu.packages import lacking, needed, search_path
from experiments.gpu.part import Setting
from experiments.gpu.parts import PARTS, Part, parts_named
from experiments.gpu.system import served
from experiments.gpu.table import table
from spire.cli.paths import Pair
from spire.errors import SpireError
from spire.perf.shapes import LLAMA_3_8B
from tests.paths import ROOT

# Seven services are started, on whatever machine.
pytestmark = pytest.mark.timeout(1600)


CELLS = [("a cell", 1.5), ("a cell that failed", None)]


def make_gpu(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"OUT={out}", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)


@pytest.mark.thorough
def test_make_gpu_dry_runs_every_part_and_prints_a_table(tmp_path: Path) -> None:
    done = make_gpu(tmp_path, "DRY_RUN=1")
    (file,) = tmp_path.glob("*.json")
    run = json.loads(file.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(part["part"], part["status"]) for part in run["parts"]] == [(n, "ok") for n in range(11)]
    assert run["machine"]["torch"] in done.stdout
    found = {(part["part"], found["what"]): found for part in run["parts"] for found in part["findings"]}
    assert found[1, "float32: texts that part, k = 4 from k = 0"]["measured"] == 0
    assert found[3, "prompt of 40 tokens"]["measured"] > 0
    assert found[3, "2 × 130, verify k = 4"]["measured"] > 0
    assert found[4, "verdict, 2 sequences, k = 4, sampled"]["measured"] > 0
    assert found[5, "a draft's round, 2 sequences, k = 4, bfloat16"]["measured"] > 0
    assert found[6, "2 × 24, k = 4, SYNTHETIC acceptance 0.8"]["measured"] > 0
    assert found[7, "τ at k = 4"]["measured"] > 1
    assert found[8, "transformers, generate_batch, 2 × 24, plain"]["measured"] > 0
    assert found[9, "tests that need a GPU, failed"]["measured"] == 0
    assert found[10, "2 × 24, automatic k"]["measured"] > 0
    for (_, what), finding in found.items():
        assert what in done.stdout
        assert finding["predicted"] is None or finding["predicted"] >= 0


def test_without_a_gpu_nothing_is_measured_and_the_dry_run_is_named(tmp_path: Path) -> None:
    done = make_gpu(tmp_path)
    assert done.returncode != 0
    assert "torch sees no GPU here; --dry-run" in done.stderr


def test_the_parts_fit_twelve_minutes_together_and_ten_each() -> None:
    assert sum(part.estimate for part in PARTS) <= 12 * 60
    assert all(part.estimate < part.limit < 10 * 60 for part in PARTS)


def run_parts(
    parts: list[Part], directory: Path, earlier: dict[int, dict[str, Any]] | None = None, **asked_for: object
) -> dict[str, Any]:
    run: dict[str, Any] = {"parts": []}
    asked = Namespace(**{"within": 100, "dry_run": True} | asked_for)
    gpu._run_all(parts, asked, dict(os.environ), directory, run, directory / "run.json", earlier or {})
    return json.loads((directory / "run.json").read_text())


@pytest.mark.thorough
def test_a_part_that_crashes_is_a_finding_and_the_next_goes_on(tmp_path: Path) -> None:
    run = run_parts([Part(8, "no_such_module", "crashes", 1, 60), PARTS[0]], tmp_path)
    crashed, after = run["parts"]
    assert (crashed["status"], after["status"]) == ("failed", "ok")
    assert "no_such_module" in crashed["error"]
    assert after["findings"]


def test_a_part_whose_time_is_up_keeps_what_it_had_found(tmp_path: Path) -> None:
    Findings(tmp_path / "3.json").add(Finding("a step", 1.5, "ms"))
    (late,) = run_parts([Part(3, "step_time", "is slow", 1, limit=1)], tmp_path, dry_run=False)["parts"]
    assert late["status"] == "out of time"
    assert late["error"].startswith("ended after 1 s")
    assert late["findings"][0]["measured"] == 1.5


def test_a_resumed_run_keeps_what_was_measured_and_goes_on_with_the_rest(tmp_path: Path) -> None:
    done = {"part": 0, "status": "ok", "findings": [{"what": "copy rate"}]}
    of_all = {"unit": "", "predicted": None, "note": "", "more": None}
    cells = [{"what": what, "measured": measured} | of_all for what, measured in CELLS]
    broken = {"part": 3, "status": "out of time", "findings": cells}
    parts = [PARTS[0], Part(3, "no_such_module", "goes on", 1, 60)]
    first, second = run_parts(parts, tmp_path, {0: done, 3: broken})["parts"]
    assert first == done
    assert second["status"] == "failed", "it has run again"
    findings = Findings(tmp_path / "3.json")
    assert [findings.known(what) for what, _ in CELLS] == [True, False]
    findings.add(Finding("next", 1))
    assert [found["what"] for found in json.loads((tmp_path / "3.json").read_text())] == ["a cell", "next"]


@pytest.mark.parametrize("changed", [{"commit": "another"}, {"machine": {"card": "another"}}, {"dry_run": False}])
def test_a_run_of_another_commit_or_card_is_not_resumed(tmp_path: Path, changed: dict[str, Any]) -> None:
    run = {"commit": "this", "machine": {"card": "H100"}, "dry_run": True, "parts": [{"part": 3}]}
    (tmp_path / "run.json").write_text(json.dumps(run | changed))
    with pytest.raises(SystemExit, match=r"cannot be resumed.*(another|False)"):
        gpu._earlier(tmp_path / "run.json", run)
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert gpu._earlier(tmp_path / "run.json", run) == {3: {"part": 3}}


def attempted(file: Path, error: Exception) -> list[dict[str, Any]]:
    """The findings of a part whose first attempt raises `error`, and which has a second one."""
    findings = Findings(file)
    try:
        for what in ("first", "second"):
            with findings.attempt(what):
                findings.add(Finding(f"{what} figure", 1))
                if what == "first":
                    raise error
    finally:
        assert findings.failed
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def test_what_fails_within_a_part_is_a_finding_and_the_next_goes_on(tmp_path: Path) -> None:
    for number, error in enumerate((RuntimeError("x"), torch.OutOfMemoryError("CUDA out of memory"))):
        found = attempted(tmp_path / f"{number}.json", error)
        assert [one["what"] for one in found] == ["first figure", "first", "second figure"]
        assert found[1]["note"] == f"FAILED: {type(error).__name__}: {error}"
        assert "Traceback" in found[1]["more"]["error"]


def test_a_part_ends_with_the_finding_that_its_gpu_is_lost(tmp_path: Path) -> None:
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with pytest.raises(torch.AcceleratorError):
        attempted(tmp_path / "1.json", error)
    figure, lost = json.loads((tmp_path / "1.json").read_text())
    assert (figure["what"], lost["what"]) == ("first figure", "first")
    assert lost["note"] == "FAILED: AcceleratorError: CUDA error: unspecified launch failure"


def test_services_that_have_lost_their_gpu_do_not_end_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def lost(*given: Any, directory: Path, **options: Any) -> Iterator[None]:
        (directory / "verifier.log").write_text("CUDA error: unspecified launch failure\n")
        raise SpireError("the verifier service ended with exit code 4")
        yield

    monkeypatch.setattr("experiments.gpu.system.serving", lost)
    findings = Findings(tmp_path / "1.json")
    setting = Setting(torch.device("cpu"), tiny=True)
    with findings.attempt("services"), served(setting, findings, Pair(tmp_path, None)):
        pass
    (found,) = json.loads((tmp_path / "1.json").read_text())
    assert found["note"].startswith("FAILED: SpireError: the verifier service ended with exit code 4")
    assert "verifier: CUDA error: unspecified launch failure" in found["more"]["error"]


def test_parts_for_which_no_time_is_left_are_told_of(tmp_path: Path) -> None:
    (left_out,) = run_parts([PARTS[0]], tmp_path, within=0, dry_run=False)["parts"]
    assert (left_out["status"], left_out["error"]) == ("not begun", "no time was left")


@pytest.mark.parametrize("unknown", ["11", "x", "", "-1", "0x1"])
def test_an_unknown_part_is_refused_as_it_was_named(unknown: str) -> None:
    assert [part.number for part in parts_named("3, 0,3")] == [3, 0]
    with pytest.raises(ValueError, match=f"there is no part '{unknown}', only 0, 1, .*, 9, 10"):
        parts_named(f"0,{unknown}")


def test_a_torch_that_ends_without_a_word_is_one_line() -> None:
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(SystemExit, match=r"^gpu: torch cannot be used: ended by SIGKILL$"):
        gpu._machine(killed, dict(os.environ))


def closure(names: Iterable[str]) -> set[str]:
    """These packages and all that they need here, by their metadata."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        found.add(name)
        wanted = [Requirement(line) for line in distribution(name).requires or []]
        waiting += [
            canonicalize_name(one.name) for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})
        ]
    return found


def test_the_wheels_and_what_a_machine_has_are_all_that_is_needed() -> None:
    lines = (ROOT / "experiments" / "gpu" / "wheels.txt").read_text().splitlines()
    wheels = [line for line in lines if not line.startswith("#")]
    assert needed().keys() <= closure([*wheels, "torch", "numpy", "tokenizers", "safetensors"])


def test_what_a_machine_lacks_is_named_with_the_version_that_is_needed() -> None:
    floors = {"grpcio": "1.78", "pydantic": "2.11"}
    assert lacking({"grpcio": "1.78.0", "pydantic": "2.14.4"}, floors) == []
    assert lacking({"grpcio": "1.9.1"}, floors) == ["grpcio is 1.9.1, 1.78 is needed", "pydantic>=2.11 is missing"]
    assert {"torch", "protobuf", "grpcio", "llguidance", "fastapi"} <= needed().keys()


def test_missing_packages_without_wheels_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.gpu.packages.WHEELS", tmp_path)
    assert search_path(tmp_path) == [str(ROOT)]
    monkeypatch.setattr("experiments.gpu.packages.installed", lambda paths: {})
    with pytest.raises(RuntimeError, match=r"grpcio>=1\.78 is missing.*Run 'make gpu-wheels'"):
        search_path(tmp_path)


def test_a_step_is_expected_as_long_as_its_bytes_take() -> None:
    assert 1000 * step_seconds(LLAMA_3_8B, 64, 8192, 3.0e12) == pytest.approx((1.2 * 15 + 1.05 * 68.7) / 3, rel=0.05)
    assert 1000 * step_seconds(LLAMA_3_8B, 1, 128, 3.0e12) == pytest.approx(1.2 * 15 / 3, rel=0.05)
    assert 1000 * floor_seconds(LLAMA_3_8B, 32, 8192, 3.0e12) == pytest.approx(16.5, rel=0.05)


def test_the_table_shows_predictions_beside_figures_and_failures() -> None:
    found = {"what": "plain", "predicted": 57.1, "measured": 60.25, "unit": "ms", "note": ""}
    parts = [{"part": 3, "what": "step", "status": "failed", "error": "exit code 1\nTrace\nOops", "findings": [found]}]
    machine = {"card": "a card", "driver": "580.1", "torch": "2.11"}
    run = {"machine": machine, "dry_run": False, "commit": "abc", "began": "today", "parts": parts}
    told = table(run)
    assert "card a card · driver 580.1 · torch 2.11 · commit abc" in told
    assert any(line.split()[:5] == ["3", "plain", "57.1", "60.2", "ms"] for line in told.splitlines())
    assert "exit code 1: Oops" in told
