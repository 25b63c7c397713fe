"""A stop head learns which draft tokens the target accepts, and is kept beside its draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from spire.checkpoints.weights import STOP_HEAD, load_draft
from spire.cli import app
from spire.model.config import StopHeadConfig
from spire.training.stopping.head import StopHeadRecipe, fit
from spire.training.stopping.samples import Samples
from tests.conftest import FIXTURES

TEXT = FIXTURES / "text" / "jowett_charmides.txt"


def samples(count: int, seed: int) -> Samples:
    """Tokens that are accepted by a rule of the hidden state, which the entropy of q does not tell."""
    random = torch.Generator().manual_seed(seed)
    hidden_ND = 3 + torch.randn(count, 8, generator=random)
    told_NF = torch.rand(count, 5, generator=random)
    accepted_N = torch.sigmoid(4 * (hidden_ND[:, 0] - 3))
    return Samples(hidden_ND, told_NF, accepted_N, torch.ones(count))


@pytest.mark.parametrize("rejected_weight", [1.0, 6.0])
def test_a_head_predicts_probabilities_whatever_rejections_count(rejected_weight: float) -> None:
    recipe = StopHeadRecipe(depth=1, width=16, rejected_weight=rejected_weight)
    figures = fit(samples(20_000, 1), samples(2_000, 2), samples(4_000, 3), recipe).figures
    assert figures.auc > figures.auc_of_entropy + 0.25
    for predicted, accepted, share in figures.calibration:
        assert share < 0.02 or abs(predicted - accepted) < 0.08, figures.calibration


def test_a_trained_head_lies_beside_its_draft_and_is_loaded_with_it(
    stories_dir: Path, stories_draft_dir: Path, tmp_path: Path
) -> None:
    asked = ["--target", str(stories_dir), "--draft", str(stories_draft_dir), "--data", str(TEXT), "--json"]
    small = ["--samples", "6000", "--k", "4", "--depth", "1", "--width", "8", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["train", "stop-head", *asked, *small], catch_exceptions=False)
    (figures,) = json.loads(done.stdout)
    assert 0.5 < figures["auc"] < 1
    assert (tmp_path / STOP_HEAD).is_file()
    before, after = load_draft(stories_draft_dir), load_draft(tmp_path)
    assert after.draft.stop_head == StopHeadConfig(depth=1, width=8)
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
