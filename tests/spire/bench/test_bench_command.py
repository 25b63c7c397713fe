"""`spire bench`: what it measures, prints and refuses, on a real small pair."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from spire.bench.cell import AUTO, Cell, Depth, chosen_depths
from spire.bench.client import BenchError
from spire.bench.load import Batch
from spire.bench.prompts import PromptMaker
from spire.bench.stream import Streamed
from spire.bench.throughput import Figures, figures_of_steps
from spire.cli import app
from spire.cli.bench import report as bench_report
from spire.cli.bench.comparison import learning_runs
from spire.errors import SpireError
from tests.marks import thoroughly
from tests.services import Services
from tests.spire.bench.command import bench


def test_an_interval_of_the_gain_needs_five_turns_and_holds_their_spread() -> None:
    ours, plain = (
        [figures_cell(0, rate).runs[0] for rate in rates] for rates in ((180, 190, 200, 210, 220), [100] * 5)
    )
    cell = Cell("spire", "spire", 4, 1, 512, ours, plain)
    low, high = cell.multiplier_ci95 or (0.0, 0.0)
    assert 1.79 < low < 1.95 < cell.multiplier_measured < 2.05 < high < 2.21
    assert cell.to_json()["multiplier_ci95"] == (low, high)
    assert Cell("spire", "spire", 4, 1, 512, ours[:4], plain[:4]).multiplier_ci95 is None


def test_prompts_that_differ_do_not_hide_how_depths_do() -> None:
    of_prompts, noise = (50, 100, 150, 60, 120), (1.01, 0.99, 1.0, 0.98, 1.02)
    ours = [figures_cell(0, 1.1 * rate * by).runs[0] for rate, by in zip(of_prompts, noise, strict=True)]
    plain = [figures_cell(0, rate).runs[0] for rate in of_prompts]
    cell = Cell("spire", "spire", 4, 1, 512, ours, plain)
    low, high = cell.multiplier_ci95 or (0.0, 0.0)
    assert cell.multiplier_measured == pytest.approx(1.1, rel=0.002)
    assert 1.08 < low < 1.1 < high < 1.12


@pytest.mark.parametrize(("batch", "runs"), [(1, 8), (4, 8), (16, 4), (64, 1), (200, 1)])
def test_the_choice_of_k_learns_from_64_requests_of_a_wide_batch(batch: int, runs: int) -> None:
    assert learning_runs(Batch(cast(PromptMaker, None), batch, 512, 128, 1.0)) == runs


def test_a_chosen_depth_is_compared_with_the_best_fixed_one_of_its_load(capsys: pytest.CaptureFixture[str]) -> None:
    def cell(k: Depth, rates: tuple[int, ...], context: int = 512) -> Cell:
        return Cell("spire", "spire", k, 1, context, [figures_cell(0, rate).runs[0] for rate in rates])

    fixed = [cell(k, rates) for k, rates in ((0, (100,) * 5), (2, (150, 140, 160, 155, 145)), (4, (130,) * 5))]
    auto = cell(AUTO, (165, 154, 176, 170, 160))
    (choice,) = chosen_depths([*fixed, cell(8, (900,) * 5, context=128), auto])
    assert (choice.draft, choice.batch, choice.context, choice.best_k) == ("spire", 1, 512, 2)
    assert choice.ratio == pytest.approx(1.1, rel=1e-3)
    low, high = choice.ci95 or (0.0, 0.0)
    assert 1.09 < low <= 1.1 <= high < 1.11
    assert chosen_depths([fixed[0], auto]) == []
    bench_report.show([*fixed, auto], "a target")
    assert "best fixed k = 2: 1.10 × (1.10–1.10)" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.thorough
def test_every_draft_is_compared_with_plain_decoding_in_its_own_services(
    stories_dir: Path, stories_draft_dir: Path, prose: list[Path]
) -> None:
    drafts = f"off,mine={stories_draft_dir},magicdec"
    shape = ["--dtype", "float32", "--batch", "2", "--context", "20", "--generate", "128", "--repeats", "2"]
    pair = ["--model", str(stories_dir), "--drafts", drafts, "--data", str(prose[0]), "--k", "2,auto"]
    cells = json.loads(bench(*pair, *shape, "--json", OMP_NUM_THREADS="1"))["bench"]
    depths = (0, 2, "auto")
    assert [(c["draft"], c["batch"], c["k"]) for c in cells] == [
        (draft, 2, k) for draft in ("mine", "magicdec") for k in depths
    ]
    for cell in cells:
        assert cell["system"] == "spire"
        assert cell["synthetic"] is False
        assert cell["generated"] == 128 * cell["batch"]
        assert len(cell["decode_tokens_per_second_runs"]) == 2
        assert cell["multiplier_measured"] > 0
        assert cell["multiplier_modelled"] is None  # nobody has calibrated this machine
        assert (cell["multiplier_measured"] == 1) == (cell["k"] == 0)
        assert cell["mean_k"] == 0 if cell["k"] == 0 else cell["mean_k"] >= 0
        assert 0 < cell["busy"]["verifier"] < 1.5
        assert set(cell["busy"]) == ({"verifier", "draft"} if cell["draft"] == "mine" else {"verifier"})
        if sys.platform.startswith("linux"):
            assert 100e6 < cell["peak_memory_bytes"] < 20e9


def test_tables_are_whole_at_80_columns(services: Services, stories_dir: Path, prose: list[Path]) -> None:
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--generate", "16"]
    printed = bench(*common, "--batch", "2", "--context", "20", "--repeats", "1", COLUMNS="80", TERM="dumb")
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert re.search(r"^ *20 +2 +0 .* 1\.00 ", printed, re.MULTILINE)
    assert "modelled" in printed


def test_progress_is_told_from_the_start_and_line_by_line_off_a_terminal(
    services: Services, stories_dir: Path, prose: list[Path]
) -> None:
    shape = ["--generate", "8", "--batch", "2", "--context", "20", "--repeats", "1", "--k", "2", "--json"]
    common = ["bench", "--url", services.url, "--model", str(stories_dir), "--data", str(prose[0])]
    done = CliRunner().invoke(app, [*common, *shape], catch_exceptions=False)
    assert json.loads(done.stdout)["complete"]
    told = [line for line in done.stderr.splitlines() if line.startswith("as served")]
    assert told[0] == f"as served: asking {services.url}"
    assert told[1] == "as served: warming"
    assert told[-1] == "as served: 2 × 20 tokens, 4 of 4"


def test_measured_multipliers_are_drawn_beside_modelled_ones(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [figures_cell(k, rate) for k, rate in ((0, 100.0), (4, 180.0))]
    assert bench_report.plot(tmp_path / "plots", cells).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SpireError, match="no depth above 0 was measured"):
        bench_report.plot(tmp_path, cells[:1])


def figures_cell(k: int, rate: float) -> Cell:
    """A cell with all decoding at this rate."""

    def runs(tokens_per_second: float) -> list[Figures]:
        arrivals = [(at / tokens_per_second, 1) for at in range(40)]
        return [figures_of_steps([Streamed(0, arrivals)], peak=None)]

    return Cell("spire", "spire", k, 1, 512, runs(rate), runs(100.0), {"multiplier_modelled": 2.0} if k else {})


@pytest.mark.thorough
def test_what_was_measured_is_told_even_if_the_rest_fails(
    services: Services, stories_dir: Path, prose: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spire.bench.peers.servers._message", lambda task: {"model": "nowhere"})
    common = ["--url", services.url, "--model", str(stories_dir), "--data", str(prose[0]), "--json"]
    shape = ["--batch", "1", "--context", "20", "--generate", "8", "--repeats", "1", "--peers", "transformers"]
    result = CliRunner().invoke(app, ["bench", *common, *shape])
    assert isinstance(result.exception, SpireError)
    told = json.loads(result.stdout)
    assert told["complete"] is False
    assert [cell["k"] for cell in told["bench"]] == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafts", "vanilla"], "no vanilla draft is bundled.*vanilla=DIR"),
        (["--drafts", "medusa"], "--drafts medusa is no directory"),
        (["--drafts", "spire"], "the bundled draft is not .*stories260K's"),
        (["--context", "500", "--generate", "128"], "500 prompt tokens and 128 more do not fit the target's 512"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    stories_dir: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["bench", "--model", str(stories_dir), "--context", "100", *arguments])
    assert isinstance(result.exception, SpireError)
    assert re.search(message, str(result.exception))


@pytest.mark.thorough
@pytest.mark.parametrize("as_text", [[], thoroughly(["--as-text"])])
def test_the_same_load_goes_to_any_server_with_standard_fields_only(
    services: Services, stories_dir: Path, prose: list[Path], as_text: list[str]
) -> None:
    common = ["--model", str(stories_dir), "--data", str(prose[0]), "--generate", "16", "--repeats", "2", "--json"]
    load = ["--batch", "2", "--context", "20", "--against", f"{services.url}/v1/", *as_text]
    (cell,) = json.loads(bench(*common, *load))["bench"]
    assert (cell["system"], cell["draft"], cell["k"]) == (services.url, None, None)
    assert (cell["batch"], cell["context"], cell["runs"]) == (2, 20, 2)
    assert 2 <= cell["generated"] <= 32
    assert cell["multiplier_measured"] is None  # nothing of ours was measured beside it
    assert cell["end_to_end_tokens_per_second"] > 0


def test_a_server_that_does_not_say_what_it_serves_is_named() -> None:
    result = CliRunner().invoke(app, ["bench", "--against", "http://127.0.0.1:9"])
    assert isinstance(result.exception, BenchError)
    assert "http://127.0.0.1:9/v1/models does not say what is served there" in str(result.exception)
