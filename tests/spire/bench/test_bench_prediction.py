"""What `spire bench` prints as modelled is what `spire perf-model` predicts."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from spire.bench.prediction import PairModel, recorded_acceptance
from spire.cli import app
from spire.perf import calibration
from tests.paths import ROOT

CALIBRATION = ROOT / "experiments" / "results" / "calibration.json"


def test_what_is_modelled_does_not_depend_on_the_run() -> None:
    target, draft = ROOT / "models" / "target", ROOT / "models" / "draft"
    model = PairModel(target, draft, calibration.load(CALIBRATION).hardware)
    prediction = model.predict(batch=16, context=1900, k=4, tau=1.5)
    options = ["--target", "tiny", "--hardware", str(CALIBRATION), "--batch", "16", "--context", "1900", "--json"]
    told = CliRunner().invoke(app, ["perf-model", *options], catch_exceptions=False)
    assert prediction["multiplier_modelled"] == json.loads(told.stdout)["drafts"][0]["multiplier"]
    assert prediction["tau_modelled_from"] == "record"
    assert model.predict(16, 1900, 4, tau=4.9) == prediction


def test_what_is_modelled_is_of_the_temperature_that_is_measured() -> None:
    """SmolLM2's draft has records at temperatures 0 and 1; more of what it drafts is accepted at 0."""
    greedy, sampled = (recorded_acceptance(ROOT / "models" / "smollm2-draft", 300, t) for t in (0.0, 0.8))
    assert greedy is not None
    assert sampled is not None
    assert greedy.tau(4) > sampled.tau(4) + 0.1


def test_an_unmeasured_draft_is_modelled_at_the_runs_tau_and_says_so() -> None:
    model = PairModel(ROOT / "models" / "target", None, calibration.load(CALIBRATION).hardware)
    slow, fast = (model.predict(16, 1900, 4, tau)["multiplier_modelled"] for tau in (2.0, 4.0))
    assert fast == pytest.approx(2 * slow, rel=0.01)
    assert model.predict(16, 1900, 4, 2.0)["tau_modelled_from"] == "this run"
    assert model.predict(16, 1900, None, 2.0)["multiplier_modelled"] is None


def test_automatic_depth_is_modelled_at_the_models_own_best() -> None:
    model = PairModel(ROOT / "models" / "target", ROOT / "models" / "draft", calibration.load(CALIBRATION).hardware)
    best = model.predict(16, 1900, None, None)
    assert best["k_modelled"] >= 1
    assert best["multiplier_modelled"] >= model.predict(16, 1900, 4, None)["multiplier_modelled"] > 1
