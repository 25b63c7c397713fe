"""`spire perf-model`: it prints the paper's table, reads what is measured, and refuses by name what it cannot model."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spire.cli import app
from spire.errors import SpireError
from spire.model.config import load_model_config
from spire.perf_model import (
    Shape,
)

BUNDLED = Path(__file__).parents[1] / "models"


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["perf-model", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["perf-model", *arguments])
    assert isinstance(result.exception, SpireError), result.output
    return str(result.exception)


def test_the_command_prints_the_paper_s_table() -> None:
    report = run("--draft", "vanilla", "--draft", "magicdec", "--draft", "spire")
    assert [round(row["multiplier"], 3) for row in report["drafts"]] == [1.361, 2.052, 2.779]
    assert report["critical_context"] == 32
    table = CliRunner().invoke(app, ["perf-model"], env={"COLUMNS": "100"}).output
    assert "16,779,264" in table
    assert "2.779" in table


@pytest.mark.parametrize(
    "arguments",
    [
        "--draft magicdec",
        "--target llama-3-70b --hardware h100 --devices 8 --split --draft-hardware h100 --price 2.5",
    ],
)
def test_the_manual_shows_what_the_command_prints(arguments: str) -> None:
    manual = (Path(__file__).parents[1] / "docs" / "performance-model.md").read_text()
    assert f"`spire perf-model {arguments}`" in manual
    printed = CliRunner().invoke(app, ["perf-model", *arguments.split()], env={"COLUMNS": "80"}).output
    shown = manual[manual.index(f"`spire perf-model {arguments}`") :].split("```")[1]
    assert "\n".join(line.rstrip() for line in shown.splitlines()).strip("\n") in "\n".join(
        line.rstrip() for line in printed.splitlines()
    )


def test_both_windows_are_shown_where_they_differ() -> None:
    both = run("--target", "llama-3-70b")["drafts"]
    assert [(row["window"], row["cached_positions"]) for row in both] == [("64", 65), ("L/8", 8193)]
    assert round(both[1]["multiplier"], 2) == 2.82
    assert [row["window"] for row in run("--target", "llama-3-70b", "--window", "paper")["drafts"]] == ["L/8"]


def test_the_map_says_where_speculation_is_off() -> None:
    cells = run("--draft", "magicdec", "--batches", "1,128", "--contexts", "32,8192")["map"]
    found = {(cell["batch"], cell["context"]): cell["k"] for cell in cells}
    assert found[1, 32] == 0
    assert found[128, 8192] > 0
    shown = CliRunner().invoke(app, ["perf-model", "--draft", "magicdec"], env={"COLUMNS": "80"}).output
    assert "off .94" in shown


def test_a_checkpoint_without_a_measured_tau_is_refused_with_the_command_that_measures_it() -> None:
    said = refusal("--target", "bundled", "--draft", "vanilla")
    assert "spire eval acceptance" in said
    assert "--tau" in said


def test_the_bundled_pair_is_read_from_its_directories() -> None:
    shares = ("--acceptance", "0.83,0.69,0.58,0.48", "--context", "512")
    by_name = run("--target", "bundled", *shares)
    by_path = run("--target", str(BUNDLED / "target"), "--draft", str(BUNDLED / "draft"), *shares)
    assert by_name["drafts"][0]["multiplier"] == by_path["drafts"][0]["multiplier"]
    assert by_name["drafts"][0]["tau"] == pytest.approx(3.58)
    assert by_name["drafts"][0]["body_parameters"] == _body_parameters("draft")


def test_what_was_measured_of_a_draft_is_read_from_beside_it_at_the_nearest_context(tmp_path: Path) -> None:
    draft = shutil.copytree(BUNDLED / "draft", tmp_path / "draft")
    cells = [_cell(context, [share]) for context, share in ((256, 0.9), (1900, 0.5))]
    (draft / "acceptance.json").write_text(json.dumps({"acceptance": cells}))
    pair = ("--target", str(BUNDLED / "target"), "--draft", str(draft), "--k", "1")
    assert run(*pair, "--context", "512")["drafts"][0]["tau"] == pytest.approx(1.9)
    assert run(*pair, "--context", "1024")["drafts"][0]["tau"] == pytest.approx(1.5)
    assert run(*pair, "--tau", "1.2")["drafts"][0]["tau"] == pytest.approx(1.2)
    (draft / "acceptance.json").write_text("{}")
    assert "is not what 'spire eval acceptance --json' prints" in refusal(*pair)


def _cell(context: int, prefix: list[float]) -> dict[str, Any]:
    figures = {"contexts": 512, "k": len(prefix), "temperature": 1.0, "generated": 1, "rounds": 1, "short_rounds": 0}
    return figures | {"context": context, "tau": 1 + sum(prefix), "tau_ci95": 0.03, "prefix_acceptance": prefix}


def test_any_target_gets_the_paper_s_rule_for_a_draft() -> None:
    row = run("--target", str(BUNDLED / "target"), "--draft", "vanilla", "--tau", "2.5")["drafts"][0]
    assert row["body_parameters"] == pytest.approx(_body_parameters("target") / 8, rel=0.01)


def test_deployments_are_priced_by_all_their_devices() -> None:
    options = ("--target", "llama-3-70b", "--hardware", "h100", "--split", "--draft-hardware", "l4")
    plain, together, apart = run(*options, "--price", "2", "--draft-price", "0.5")["deployments"]
    for row, hourly in ((plain, 2.0), (together, 2.0), (apart, 2.5)):
        assert row["price_per_million_tokens"] == pytest.approx(hourly / 3600 / row["tokens_per_second"] * 1e6)
    assert plain["multiplier"] == 1
    assert apart["round_ms"] == pytest.approx(max(apart["draft_ms"] + apart["wire_ms"], apart["verify_ms"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", "nowhere"), "none of seqax-67m, llama-3-70b, bundled"),
        (("--draft", "nowhere"), "none of vanilla, magicdec, spire"),
        (("--hardware", "abacus"), "none of a100, h100, h200, l4, calibrated"),
        (("--tau", "7"), "τ is 7.0 at k = 4"),
        (("--split", "--price", "2"), "name a device with --hardware"),
        (("--split", "--draft-hardware", "l4"), "--draft-hardware needs --hardware"),
        (("--split", "--round-trip-ms", "1"), "a wire's seconds need a device's"),
    ],
)
def test_what_cannot_be_modelled_is_refused_by_name(arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal(*arguments)


@pytest.mark.parametrize(
    "arguments", [("--tau", "3", "--acceptance", "0.8"), ("--tau", "3", *["--draft", "spire"] * 2)]
)
def test_one_acceptance_belongs_to_one_draft(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["perf-model", *arguments])
    assert result.exit_code == 2
    assert "give one" in result.output


def test_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = run("--draft", "magicdec", "--draft", "vanilla", "--plot", str(tmp_path / "figures"))
    files = [Path(name) for name in report["plots"]]
    assert {file.name for file in files} == {"speedup.png", "map.png", "intensity.png"}
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000 for file in files)


def test_plots_without_matplotlib_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'spire-serve[plot]'" in refusal("--plot", str(tmp_path))


def _body_parameters(name: str) -> int:
    return Shape.of(load_model_config(BUNDLED / name)).body_parameters
