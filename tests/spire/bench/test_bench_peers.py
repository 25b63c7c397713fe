"""Peers in the benchmark: transformers generates from the same checkpoint, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from spire.bench.load import Batch
from spire.bench.peers.servers import Task, assistant_of, check, run_transformers
from spire.bench.prompts import PromptSource
from spire.checkpoints.weights import load_target, save_draft
from spire.cli import app
from spire.errors import SpireError
from spire.model.config import DraftConfig
from spire.model.draft import prune
from tests.services import running


@pytest.mark.thorough
def test_transformers_is_measured_in_every_mode_it_has(stories_dir: Path, prose: list[Path]) -> None:
    source = PromptSource(stories_dir, prose)
    loads = [Batch(source, batch, 30, 24, temperature=1.0) for batch in (1, 3)]
    cells = list(run_transformers(Task(stories_dir, None, loads, "float32", k=3, repeats=2, seed=1)))
    assert [(cell.system, cell.batch) for cell in cells] == [
        ("transformers generate", 1),
        ("transformers prompt lookup", 1),
        ("transformers generate", 3),
    ]
    for cell in cells:
        assert len(cell.decode_runs) == 2
        assert cell.figures.generated == 24 * (cell.batch or 0)
        assert cell.figures.end_to_end_tokens_per_second > 0
        assert cell.figures.time_to_first_token_ms_p50 > 0
    assert cells[0].figures.tau == 1
    assert cells[1].figures.tau is not None
    assert cells[1].figures.tau >= 1
    assert "batch 1 only" in (cells[1].note or "")


@pytest.mark.thorough
def test_a_checkpoint_that_transformers_cannot_open_is_told_with_its_words(stories_dir: Path, tmp_path: Path) -> None:
    source = PromptSource(stories_dir, [Path(__file__)])
    loads = [Batch(source, 1, 30, 8, 1.0)]
    with pytest.raises(SpireError, match=r"transformers ended with exit code 1:(.|\n)*config"):
        list(run_transformers(Task(tmp_path, None, loads, "float32", 3, 1, 1)))


@pytest.mark.thorough
def test_only_a_draft_that_is_a_language_model_by_itself_assists(
    stories_dir: Path, stories_draft_dir: Path, prose: list[Path], tmp_path: Path
) -> None:
    target, identity = load_target(stories_dir)
    config = DraftConfig(kind="vanilla", target_fingerprint=identity, tapped_layers=(), feedback=False)
    save_draft(tmp_path, prune(target, config, (0, 1, 2, 3, 4)), torch.float32)
    assert assistant_of([stories_draft_dir]) is None
    assert assistant_of([stories_draft_dir, tmp_path]) == tmp_path
    loads = [Batch(PromptSource(stories_dir, prose), 1, 30, 24, temperature=1.0)]
    *_, assisted = run_transformers(Task(stories_dir, tmp_path, loads, "float32", k=3, repeats=1, seed=1))
    assert assisted.system == "transformers assisted"
    # The draft is the whole target, so what it guesses stands: two tokens a round or more. Only the last may be cut,
    # and the first, of up to 21 of the 24, is not counted: never under 3 tokens in 2 rounds.
    assert assisted.figures.tau is not None
    assert assisted.figures.tau >= 1.5


def test_a_peer_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpireError, match="--peers llama is not known: there is transformers"):
        check(["llama"])
    monkeypatch.setattr("spire.bench.peers.servers.find_spec", lambda name: None)
    with pytest.raises(SpireError, match=r"pip install 'spire-serve\[peers\]'"):
        check(["transformers"])


@pytest.mark.thorough
def test_peers_stand_beside_plain_decoding_of_the_same_batch(stories_dir: Path, prose: list[Path]) -> None:
    with running(stories_dir) as services:
        common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--json"]
        shape = ["--batch", "2", "--context", "20", "--generate", "16", "--repeats", "1", "--dtype", "float32"]
        arguments = ["bench", *common, *shape, "--k", "0", "--peers", "transformers"]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    plain, peer = json.loads(result.stdout)["bench"]
    assert (plain["system"], peer["system"]) == ("spire", "transformers generate")
    ratio = peer["decode_tokens_per_second"] / plain["decode_tokens_per_second"]
    assert peer["multiplier_measured"] == pytest.approx(ratio)
    assert peer["k"] is None
