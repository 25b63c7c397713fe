"""Shapes without trained weights: acceptance is synthetic, and everything that shows it says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from spire.cli import app
from spire.cli.gateway_client import run_completion
from spire.errors import SpireError
from spire.http import direct_client
from tests.paths import ROOT
from tests.services import running


@pytest.mark.thorough
def test_a_lossy_verifier_accepts_at_its_rate_and_tells_everybody(stories_dir: Path, stories_draft_dir: Path) -> None:
    options = ["--lossy-synthetic-acceptance", "0.7"]
    with running(stories_dir, stories_draft_dir, verifier_options=options) as services:
        (served,) = httpx.get(f"{services.url}/v1/models").json()["data"]
        assert served["id"] == "stories260K (LOSSY: synthetic acceptance 0.7)"
        assert "LOSSY" in services.verifier.log.read_text()
        drafted = {"k": 3}
        options = {"max_tokens": 300, "speculation": drafted, "ignore_eos": True}
        with direct_client(timeout=None) as client:
            told = [run_completion(client, services.url, "Once", seed=seed, **options) for seed in (1, 2)]
    figures = [completion.metrics["speculative_decoding"] for completion in told]
    rounds = sum(one["num_spec_steps"] for one in figures)
    tau = 1 + sum(one["num_accepted_draft_tokens"] for one in figures) / rounds
    # 1 + 0.7 + 0.49 + 0.343 = 2.53, with a standard error below 0.09 over some 230 rounds.
    assert tau == pytest.approx(2.53, abs=0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--accept-rate", "0.8"], "--accept-rate and --shape belong together"),
        (["--shape", "llama-3-8b"], "--accept-rate and --shape belong together"),
        (["--shape", "gpt-2", "--accept-rate", "0.8"], "--shape gpt-2 is not known: there is .*llama-3-8b.*qwen3-8b"),
        (["--shape", "seqax-67m", "--accept-rate", "0.8", "--layers", "9"], "8 layers"),
        (["--shape", "seqax-67m", "--accept-rate", "0.8", "--model", "models/target"], "--model"),
        (["--shape", "seqax-67m", "--accept-rate", "0.8", "--peers", "transformers"], "--peers and --shape exclude"),
    ],
)
def test_what_is_synthetic_is_asked_for_as_a_whole(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, SpireError)
    assert re.search(message, str(result.exception))


@pytest.mark.thorough
def test_a_shape_is_measured_and_every_output_says_that_it_is_synthetic(tmp_path: Path) -> None:
    shape = [
        "--shape",
        "seqax-67m",
        "--layers",
        "2",
        "--accept-rate",
        "0.8",
        "--k",
        "2",
        "--hardware",
        str(CALIBRATION),
    ]
    load = ["--batch", "2", "--context", "24", "--generate", "24", "--repeats", "1", "--plot", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", *shape, *load, "--json"], catch_exceptions=False)
    told = json.loads(result.stdout)
    assert told["target"] == "seqax-67m, 2 of 8 layers, random weights, SYNTHETIC acceptance 0.8"
    assert [cell["synthetic"] for cell in told["bench"]] == [True, True]
    drafted = told["bench"][1]
    assert drafted["tau"] == pytest.approx(1 + 0.8 + 0.64, abs=0.7)
    assert drafted["tau_modelled_from"] == "the accept rate"
    assert drafted["multiplier_modelled"] > 0
    assert (tmp_path / "bench.png").is_file()


CALIBRATION = ROOT / "experiments" / "results" / "calibration.json"
