"""The scripts that make the tables run, on toy models: what a GPU would do for hours is executed here for seconds."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import FIXTURES
from tests.markov import write_markov_pair
from tests.paths import ROOT

EXPERIMENTS = ROOT / "experiments"


@pytest.mark.thorough
@pytest.mark.timeout(1500)  # a dozen processes, one after another, on whatever machine
def test_the_paper_size_run_resumes_in_slices_until_all_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(EXPERIMENTS / "paper_size.py"), "--tiny"]
    command += ["--data", str(FIXTURES / "text" / "jowett_charmides.txt"), "--held-out", str(FIXTURES / "text")]
    command += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "out.json")]
    first = subprocess.run([*command, "--minutes", "0"], capture_output=True, text=True, check=True, timeout=500)
    assert "time is up while training target" in first.stderr
    assert not (tmp_path / "out.json").exists()
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["device"]
    assert found["target"]["tokens"] == 3 * 64
    assert sorted(found["drafts"]) == ["magicdec", "spire-2", "vanilla"]
    for draft in found["drafts"].values():
        assert [(cell["context"], cell["rule"]) for cell in draft["acceptance"]] == [(16, "rejection")]
        assert all(1 <= cell["tau"] <= 5 for cell in draft["acceptance"])


def test_a_pass_of_magicdec_is_timed_beside_a_plain_step() -> None:
    command = [sys.executable, "-m", "experiments.magicdec_pass", "--batches", "1,2", "--contexts", "20,90"]
    command += ["--k", "2", "--seconds", "0", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(1, 20), (1, 90), (2, 20), (2, 90)]
    assert all(0 < cell["ratio"] == pytest.approx(cell["pass_ms"] / cell["step_ms"]) for cell in cells)


def test_a_step_over_blocks_of_different_depths_is_timed_beside_like_ones() -> None:
    command = [sys.executable, "-m", "experiments.ragged_step", "--batches", "2,16", "--contexts", "20,90"]
    command += ["--seconds", "0", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(2, 20), (2, 90), (16, 20), (16, 90)]
    assert all(min(cell["short_ms"], cell["mixed_ms"], cell["long_ms"]) > 0 for cell in cells)


def test_a_draft_is_timed_with_and_without_its_stop_head(tmp_path: Path) -> None:
    for name, stops in (("stops", True), ("goes on", False)):
        _, draft = write_markov_pair(tmp_path / name, stops=stops)
        command = [sys.executable, str(EXPERIMENTS / "draft_time.py"), "--draft", str(draft), "--batch", "2"]
        command += ["--contexts", "128,300", "--repeats", "10", "--json"]
        figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
        assert figures["ratio"] == pytest.approx(figures["ms at 300"] / figures["ms at 128"])
        assert ("head at 128" in figures, "head at 300" in figures) == (stops, stops)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("report")


def test_the_report_says_of_every_cell_whether_it_was_measured(report: ModuleType) -> None:
    cells = report.plan()
    text = report.text({}, cells)
    assert "not measured" in text
    assert [cell.what for cell in cells if cell.what not in text] == []


def test_the_page_of_results_is_what_the_report_makes_of_the_measurements(report: ModuleType) -> None:
    """Nothing in it was edited by hand, and no file of measurements is of weights that are gone."""
    measured = report.measured()
    assert (report.ROOT / "docs" / "results.md").read_text() == report.text(measured, report.plan())
    assert sorted(file.stem for file in report.RESULTS.glob("*.json")) == sorted(measured)
    assert "not measured" not in report.text(measured, report.plan())


def test_the_table_of_peers_has_medians_of_runs_in_which_all_decoded(tmp_path: Path) -> None:
    cells = [("Spire", 1, [90.0, 70.0, 80.0]), ("vLLM", 1, [40.0, None, 36.0]), ("vLLM", 4, [None])]
    rates = [
        {"system": system, "batch": batch, "context": 512, "tokens_per_second": runs} for system, batch, runs in cells
    ]
    (tmp_path / "peers.json").write_text(json.dumps({"prompts": {}, "rates": rates}))
    command = [sys.executable, "-m", "experiments.peers", "show", str(tmp_path / "peers.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    rows = [line.replace("│", " ").split() for line in done.stdout.splitlines()]
    assert ["512", "1", "80", "38"] in rows
    assert not [row for row in rows if row[:2] == ["512", "4"]]


def test_a_measurement_of_peers_keeps_its_prompts(tmp_path: Path) -> None:
    peers = importlib.import_module("experiments.peers")
    record = peers.Record(tmp_path / "peers.json")
    record.kept["prompts"]["1 512 0"] = [[1, 2]]
    cell = peers.Batch(record, 1, 512, 8, 0.0)
    record.add("vLLM", cell, [38.0])
    again = peers.Record(tmp_path / "peers.json")
    assert again.cut(1, 512, 0) == [[1, 2]]
    assert again.has("vLLM", cell)
    assert not again.has("Spire", cell)
