"""Rules of stopping are compared on the target's own text: how often it verifies, and what is drafted in vain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from spire.checkpoints.weights import load_draft, save_stop_head
from spire.cli import app
from spire.decoding.sampling import Rule
from spire.decoding.verification import SparseDistribution, verify
from spire.model.config import StopHeadConfig
from spire.model.stop_head import StopHead
from spire.training.stopping import rules
from spire.training.stopping.rules import (
    Costs,
    Judge,
    JudgedTexts,
    cost_threshold,
    counts_at_threshold,
    fronts,
    walk,
)
from tests.conftest import FIXTURES
from tests.spire.decoding.test_verification import sampled_rows

TEXT = FIXTURES / "text" / "jowett_charmides.txt"
OTHER = FIXTURES / "text" / "gibbon_memoirs.txt"
K = 6


def judged(predicts: bool, texts: int = 40, places: int = 60) -> JudgedTexts:
    """Tokens that are accepted with one of two probabilities, which the head knows, or of which it knows nothing."""
    random_ = torch.Generator().manual_seed(1)
    easy_NTJ = torch.rand(texts, places, K, generator=random_) < 0.8
    accepted_NTJ = torch.where(easy_NTJ, 0.95, 0.1)
    predicted_NTJ = accepted_NTJ if predicts else torch.rand(texts, places, K, generator=random_)
    own = torch.rand(2, texts, places, K, generator=random_)
    return JudgedTexts(accepted_NTJ, predicted_NTJ, *own)


def walked(accepted_TJ: Tensor, counts_T: Tensor) -> tuple[int, int, int]:
    """Rounds, draft tokens and accepted tokens of one text in which each token is certainly accepted or rejected."""
    at = rounds = drafted = accepted = 0
    while at < len(counts_T):
        asked = int(counts_T[at])
        stood = int(accepted_TJ[at, :asked].cumprod(dim=0).sum())
        at, rounds, drafted, accepted = at + stood + 1, rounds + 1, drafted + asked, accepted + stood
    return rounds, drafted, accepted


def test_rounds_follow_one_another_as_in_serving() -> None:
    random_ = torch.Generator().manual_seed(2)
    accepted_NTJ = (torch.rand(5, 40, K, generator=random_) < 0.7).float()
    counts_NT = torch.randint(1, K + 1, (5, 40), generator=random_)
    tally = walk(JudgedTexts(accepted_NTJ, None, accepted_NTJ, accepted_NTJ), counts_NT[None])
    for text in range(5):
        weight_SN = torch.eye(5).double()[text : text + 1]
        found = tuple(round(float(value)) for value in tally.sums(weight_SN))
        assert found == walked(accepted_NTJ[text], counts_NT[text])


def test_a_walk_gives_the_mean_of_many_drawn_ones() -> None:
    texts = judged(True, texts=1, places=30)
    counts_NT = counts_at_threshold(texts.accepted_NTJ, 0.5)
    rounds, drafted, accepted = walk(texts, counts_NT[None]).sums(torch.ones(1, 1).double())
    random_, draws = torch.Generator().manual_seed(3), 4000
    drawn = [
        walked(torch.rand(texts.accepted_NTJ[0].shape, generator=random_) < texts.accepted_NTJ[0], counts_NT[0])
        for _ in range(draws)
    ]
    for expected, values in zip((rounds, drafted, accepted), zip(*drawn, strict=True), strict=True):
        values_D = torch.tensor(values).double()
        assert abs(float(values_D.mean()) - float(expected)) < 4 * float(values_D.std()) / draws**0.5


def drawn_by(p_DV: Tensor, q_DV: Tensor, texts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draft tokens [N, D] of q, which like p has a row for each depth, and their p/q."""
    tokens_ND = torch.multinomial(q_DV, texts, True, generator=torch.Generator().manual_seed(seed)).T
    return tokens_ND, (p_DV / q_DV).gather(1, tokens_ND.T).T


def test_the_weights_of_prefixes_are_what_the_block_rule_accepts() -> None:
    """The mean of the weights over drafts is how many tokens it accepts; the rejection rule's mean is smaller."""
    random_, N, K_, V = torch.Generator().manual_seed(4), 40_000, 3, 6
    p_TV, q_KV = (torch.rand(rows, V, generator=random_).pow(3).add(0.01) for rows in (K_ + 1, K_))
    p_TV, q_KV = p_TV / p_TV.sum(-1, keepdim=True), q_KV / q_KV.sum(-1, keepdim=True)
    tokens_NK, ratio_NK = drawn_by(p_TV[:-1], q_KV, N, 5)
    q, rows = SparseDistribution(None, q_KV.expand(N, K_, V)), sampled_rows(N, rule=Rule.BLOCK)
    verdict = verify(p_TV.expand(N, -1, V), tokens_NK, torch.full((N,), K_), q, rows, torch.zeros(N).long())
    texts = JudgedTexts(ratio_NK[:, None], None, ratio_NK, ratio_NK)
    by_block_N, by_rejection_N = (texts.stands_NTJ(by_block).sum(dim=(1, 2)) for by_block in (True, False))
    accepted_N = verdict.accepted_B.double()
    error = 4 * float((accepted_N - by_block_N).std()) / N**0.5
    assert abs(float((accepted_N - by_block_N).mean())) < error
    assert float((accepted_N - by_rejection_N).mean()) > 2 * error


def test_a_head_that_knows_saves_verifications_up_to_the_oracle() -> None:
    found = fronts("a", judged(True), 1.0, [Costs.linear("paper", K, 0.112, 0.0234)])
    _, low, _ = found.saved["head"]
    assert low > 0.05
    oracle = next(point for point in found.points if point.rule == "oracle")
    assert oracle.discard_rate == pytest.approx(0, abs=1e-9)
    best = max(point.gains["paper"][0] for point in found.points if point.rule == "head")
    by_cost = next(point for point in found.points if point.rule == "cost: paper")
    assert 1 < best <= oracle.gains["paper"][0]
    assert by_cost.gains["paper"][0] > 0.98 * best
    assert found.head is not None
    assert found.head.auc > found.head.auc_of_entropy + 0.3


def test_a_head_that_knows_nothing_saves_nothing() -> None:
    """A control for the test above."""
    found = fronts("a", judged(False), 1.0, [Costs.linear("paper", K, 0.112, 0.0234)])
    assert found.saved["head"][0] < 0.01


def test_a_front_reaches_depths_where_hardly_a_token_is_accepted() -> None:
    """A head that says the mean of every token drafts as fixed k does: its front may save nothing, nor lose."""
    accepted_NTJ = torch.full((20, 60, 12), 0.4)
    found = fronts("a", JudgedTexts(accepted_NTJ, accepted_NTJ, accepted_NTJ, accepted_NTJ), 1.0, [])
    assert abs(found.saved["head"][0]) < 2e-4


def test_the_dearer_a_draft_token_the_sooner_the_cost_rule_stops() -> None:
    texts = judged(True)
    assert texts.predicted_NTJ is not None
    cheap, dear = (cost_threshold(texts, texts.predicted_NTJ, Costs.linear("", K, 1.0, draft)) for draft in (0.02, 0.4))
    assert cheap < dear


def test_the_cost_rule_by_block_goes_on_where_by_rejection_it_stops() -> None:
    texts = judged(True)
    assert texts.predicted_NTJ is not None
    costs = Costs.linear("", K, 1.0, 0.1)
    by_block, by_rejection = (cost_threshold(texts, texts.predicted_NTJ, costs, rule) for rule in (True, False))
    assert by_block < by_rejection


def test_long_texts_are_judged_as_short_ones(
    stories_dir: Path, stories_draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, in which texts are judged, the two most probable tokens may change places now and then."""
    judge, prompt, answer = Judge(stories_dir, stories_draft_dir), [1, 5, 9, 30, 7], list(range(3, 63))
    at_once = judge.judge([prompt], [answer], 3, temperature=0.0).accepted_NTJ
    monkeypatch.setattr(rules, "_BLOCKS", 7)
    in_parts = judge.judge([prompt], [answer], 3, temperature=0.0).accepted_NTJ
    assert at_once.shape == in_parts.shape == (1, 60, 3)
    assert set(at_once.unique().tolist()) <= {0.0, 1.0}
    assert (at_once != in_parts).float().mean() < 0.03


@pytest.fixture
def stopping_draft_dir(stories_draft_dir: Path, tmp_path: Path) -> Path:
    """The draft with a stop head of random weights."""
    draft, config = load_draft(stories_draft_dir), StopHeadConfig(depth=0, width=8)
    draft.stop_head = StopHead(draft.config.hidden_size, config)
    draft.draft = draft.draft.model_copy(update={"stop_head": config})
    shutil.copytree(stories_draft_dir, tmp_path / "draft")
    save_stop_head(tmp_path / "draft", draft)
    return tmp_path / "draft"


def test_eval_stop_compares_the_rules_by_domain(stories_dir: Path, stopping_draft_dir: Path, tmp_path: Path) -> None:
    pair = ["--model", str(stories_dir), "--draft", str(stopping_draft_dir), "--data", str(TEXT), "--data", str(OTHER)]
    small = ["--texts", "8", "--context", "40", "--generate", "32", "--k", "4", "--plot", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, ["eval", "stop", *pair, *small], catch_exceptions=False)
    domain, other, together = json.loads(done.stdout)["stop"]
    assert [one["domain"] for one in (domain, other, together)] == [TEXT.stem, OTHER.stem, "together"]
    assert together["texts"] == 16
    shares = [one["points"][-1]["verification_rate"] for one in (domain, other, together)]
    assert min(shares) <= shares[-1] <= max(shares)
    by_rule = {(point["rule"], point["setting"]): point for point in domain["points"]}
    depths = [by_rule["fixed", k]["verification_rate"] for k in (0, 1, 2, 3, 4)]
    assert depths[0] == pytest.approx(1)
    assert depths == sorted(depths, reverse=True)
    assert by_rule["oracle", 4]["verification_rate"] == pytest.approx(depths[-1])
    assert {"head", "cost: paper"} < {rule for rule, _ in by_rule}
    low, high = domain["head"]["over_entropy"][1:]
    assert low < high
    for picture in ("stop", "calibration"):
        assert (tmp_path / f"{picture}_jowett_charmides.png").is_file()


def test_eval_stop_judges_by_the_rule_that_is_asked_for(stories_dir: Path, stopping_draft_dir: Path) -> None:
    """By the block rule at least as much is accepted, and at temperature 0 the same."""
    pair = ["--model", str(stories_dir), "--draft", str(stopping_draft_dir), "--data", str(TEXT)]
    small = [*pair, "--texts", "8", "--context", "40", "--generate", "32", "--k", "4", "--json"]

    def verifications(*options: str) -> float:
        done = CliRunner().invoke(app, ["eval", "stop", *small, *options], catch_exceptions=False)
        told = json.loads(done.stdout)
        assert told["by_block"] == ("--by-block" in options)
        points = {(point["rule"], point["setting"]): point for point in told["stop"][0]["points"]}
        return float(points["fixed", 4]["verification_rate"])

    assert verifications("--by-block") < verifications() - 0.001
    assert verifications("--by-block", "--temperature", "0") == verifications("--temperature", "0")
