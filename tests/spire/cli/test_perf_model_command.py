"""`spire perf-model`: it prints the paper's table, reads what is measured, and refuses by name what it cannot model."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.rounds.modelled import RoundModel
from gateway.rounds.round_times import Load
from spire.bench.prediction import PairModel
from spire.cli import app
from spire.errors import SpireError
from spire.model.config import load_draft_config, load_model_config
from spire.perf import calibration
from spire.perf.shape_messages import shape_to_wire
from spire.perf.shapes import Shape
from spire.v1.verifier_pb2 import DraftInfo, GetInfoResponse
from tests.paths import ROOT

BUNDLED = ROOT / "models"
CALIBRATION = ROOT / "experiments" / "results" / "calibration.json"


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
    assert [round(row["paper_multiplier"], 3) for row in report["drafts"]] == [1.361, 2.052, 2.779]
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
    manual = (ROOT / "docs" / "performance-model.md").read_text()
    assert f"`spire perf-model {arguments}`" in manual
    printed = CliRunner().invoke(app, ["perf-model", *arguments.split()], env={"COLUMNS": "80"}).output
    shown = manual[manual.index(f"`spire perf-model {arguments}`") :].split("```")[1]
    assert "\n".join(line.rstrip() for line in shown.splitlines()).strip("\n") in "\n".join(
        line.rstrip() for line in printed.splitlines()
    )


def test_both_windows_are_shown_where_they_differ() -> None:
    both = run("--target", "llama-3-70b")["drafts"]
    assert [(row["window"], row["cached_positions"]) for row in both] == [("64", 65), ("L/8", 8193)]
    assert round(both[1]["paper_multiplier"], 2) == 2.82
    assert [row["window"] for row in run("--target", "llama-3-70b", "--window", "paper")["drafts"]] == ["L/8"]


def test_the_map_says_where_speculation_is_off() -> None:
    cells = run("--draft", "magicdec", "--batches", "1,128", "--contexts", "32,8192")["map"]
    found = {(cell["batch"], cell["context"]): cell["k"] for cell in cells}
    assert found[1, 32] == 0
    assert found[128, 8192] > 0
    shown = CliRunner().invoke(app, ["perf-model", "--draft", "magicdec"], env={"COLUMNS": "80"}).output
    assert "off .94" in shown


def test_a_checkpoint_without_tau_is_refused_with_the_measuring_command() -> None:
    said = refusal("--target", "tiny", "--draft", "vanilla")
    assert "spire eval acceptance" in said
    assert "--tau" in said


def test_the_bundled_pair_is_read_from_its_directories() -> None:
    shares = ("--acceptance", "0.83,0.69,0.58,0.48", "--context", "512")
    by_name = run("--target", "tiny", *shares)
    by_path = run("--target", str(BUNDLED / "target"), "--draft", str(BUNDLED / "draft"), *shares)
    assert by_name["drafts"][0]["paper_multiplier"] == by_path["drafts"][0]["paper_multiplier"]
    assert by_name["drafts"][0]["tau"] == pytest.approx(3.58)
    assert by_name["drafts"][0]["body_parameters"] == _body_parameters("draft")


def test_a_drafts_measurements_are_read_beside_it_at_the_nearest_context(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("target", "change", "said"),
    [
        ("llama-3.1-8b", {}, "its vocabulary is 4096, llama-3.1-8b has 128256"),
        ("tiny", {"hidden_size": 512}, "its width is 512, tiny has 256"),
        ("tiny", {"num_key_value_heads": 2}, "its KV heads is 2, tiny has 4"),
        ("tiny", {"tapped": [30, 31]}, "it is sent what enters layer 31, counted from 0, tiny has 8"),
    ],
)
def test_a_draft_of_another_target_is_refused_with_both_values(
    tmp_path: Path, target: str, change: dict[str, Any], said: str
) -> None:
    raw = json.loads((BUNDLED / "draft" / "config.json").read_text())
    raw["spire_draft"]["tapped_layers"] = change.pop("tapped", raw["spire_draft"]["tapped_layers"])
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    refused = refusal("--target", target, "--draft", str(tmp_path), "--tau", "3")
    assert f"--draft {tmp_path} is of another target" in refused
    assert said in refused


# --- memory -----------------------------------------------------------------------------------------------------------

LLAMA = ("--target", "llama-3.1-8b", "--tau", "3.4", "--hardware", "h100", "--context", "8192")


def test_what_does_not_fit_is_said_first_with_the_batch_that_does() -> None:
    shown = CliRunner().invoke(app, ["perf-model", *LLAMA, "--batch", "64"], env={"COLUMNS": "80"}).output
    first = shown.splitlines()[0]
    assert first.startswith("does not fit: llama-3.1-8b with draft spire needs 91.6 GB")
    assert "of the 80 GB of h100; the largest batch at context 8,192 is 46 (services take 80%" in first
    assert "–: does not fit" in shown
    (row,) = run(*LLAMA, "--batch", "64")["drafts"]
    assert (row["fits"], row["largest_batch"], row["memory_gb"]) == (False, 46, 80)
    assert [run(*LLAMA, "--batch", str(batch))["drafts"][0]["fits"] for batch in (46, 47)] == [True, False]
    fitting = CliRunner().invoke(app, ["perf-model", *LLAMA, "--batch", "32"]).output
    assert fitting.startswith("fits: llama-3.1-8b with draft spire needs 56.6 GB")


def test_the_draft_apart_leaves_the_target_its_memory() -> None:
    plain, together, apart = run(*LLAMA, "--draft", "vanilla", "--batch", "45", "--split")["deployments"]
    assert [row["fits"] for row in (plain, together, apart)] == [True, False, True]
    assert apart["needs_gb"] == plain["needs_gb"] < together["needs_gb"]
    assert apart["draft_needs_gb"] == pytest.approx(together["needs_gb"] - plain["needs_gb"])
    small = run(*LLAMA, "--draft", "vanilla", "--batch", "45", "--split", "--draft-hardware", "l4", "--bytes", "1")[
        "deployments"
    ][2]
    assert small["draft_memory_gb"] == 24


def test_of_a_device_that_nobody_named_no_memory_is_known() -> None:
    assert run()["drafts"][0]["fits"] is None
    assert CliRunner().invoke(app, ["perf-model"]).output.startswith("no device is named (--hardware): memory and the")
    calibrated = ("--target", "tiny", "--hardware", str(CALIBRATION))
    assert run(*calibrated)["drafts"][0]["fits"] is None
    assert CliRunner().invoke(app, ["perf-model", *calibrated]).output.startswith("fits? tiny with draft spire needs")


# --- one multiplier ---------------------------------------------------------------------------------------------------


def test_every_row_has_prices_and_milliseconds() -> None:
    report = run(*LLAMA, "--split", "--price", "2.5")
    times = {"draft_ms", "wire_ms", "verify_ms", "round_ms", "tokens_per_second", "price_per_million_tokens"}
    for row in (report["plain"], *report["drafts"], *report["deployments"]):
        assert times <= set(row)
        assert row["round_ms"] > 0
        assert row["wire_ms"] > 0


def test_bench_gateway_and_command_predict_the_same() -> None:
    """The bundled pair on the committed calibration, at the τ that the record beside the draft has."""
    options = ("--target", "tiny", "--hardware", str(CALIBRATION), "--batch", "16", "--context", "1900")
    (row,) = run(*options)["drafts"]
    target, draft = BUNDLED / "target", BUNDLED / "draft"
    predicted = PairModel(target, draft, calibration.load(CALIBRATION).hardware).predict(16, 1900, 4, None)
    assert predicted["multiplier_modelled"] == row["multiplier"]
    config = load_draft_config(draft)
    live = RoundModel(CALIBRATION).multiplier(
        GetInfoResponse(shape=shape_to_wire(Shape.of(load_model_config(target)))),
        DraftInfo(
            kind="spire",
            shape=shape_to_wire(Shape.of(load_model_config(draft))),
            window=config.window,
            sink=config.sink,
        ),
        Load(sequences=16, context=1900),
        4,
        row["tau"],
    )
    assert live == row["multiplier"]


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
        (("--target", "nowhere"), "none of seqax-67m, llama-3-70b, llama-3-8b, llama-3.1-8b, qwen3-8b, tiny, smollm2"),
        (("--draft", "nowhere"), "none of vanilla, magicdec, spire"),
        (("--hardware", "abacus"), "none of a100, h100, h200, l4, calibrated"),
        (("--tau", "7"), "τ is 7.0 at k = 4"),
        (("--price", "2"), "--price needs the seconds of a device: name one with --hardware"),
        (("--split", "--draft-hardware", "l4"), "--split needs the seconds of a device: name one with --hardware"),
        (("--hardware", "h100", "--draft-hardware", "l4"), "--draft-hardware is about a draft on a device of its own"),
        (("--hardware", "h100", "--carrier", "grpc"), "--carrier is about a draft on a device of its own"),
        (("--hardware", "h100", "--round-trip-ms", "1"), "give --split too"),
        (("--hardware", "h100", "--split", "--carrier", "pigeon"), "pigeon is none of shared_memory, grpc"),
        (("--target", "qwen3-8b", "--hardware", "h100"), "no τ is known of draft spire for target qwen3-8b"),
        (("--target", "qwen3-8b", "--context", "40961"), "--context 40961: qwen3-8b takes at most 40960 positions"),
        (("--target", "llama-3-8b", "--contexts", "32,8193"), "--contexts 8193: llama-3-8b takes at most 8192"),
        (("--target", "tiny", "--context", "2049"), "--context 2049: tiny takes at most 2048 positions"),
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


def test_plots_of_what_never_fits_are_written_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = ("--batches", "256", "--contexts", "65536")
    report = run(*LLAMA, *cells, "--plot", str(tmp_path))
    assert [cell["fits"] for cell in report["map"]] == [False]
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in report["plots"])


def test_plots_without_matplotlib_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'spire-serve[plot]'" in refusal("--plot", str(tmp_path))


def _body_parameters(name: str) -> int:
    return Shape.of(load_model_config(BUNDLED / name)).body_parameters
