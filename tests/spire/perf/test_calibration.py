"""Calibration: what each microbenchmark counts, how the record is kept, and what the performance model makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from spire.checkpoints.weights import load_target, save_target
from spire.cli import app
from spire.cli.paths import BUNDLED
from spire.errors import InvalidRequest, SpireError
from spire.kernels import every_kernels
from spire.model.config import DraftConfig, ModelConfig
from spire.model.target import Target
from spire.perf import calibrator, microbenchmarks
from spire.perf.calibration import Calibration, default_file, load, save
from spire.perf.calibrator import PASSES, STEPS
from spire.perf.hardware import Cost, Curve
from spire.perf.loopback import wire_cost
from spire.perf.microbenchmarks import Bench
from spire.perf.shapes import Shape
from spire.perf.stand_ins import without_layers
from spire.service.machine_memory import memory_limit

# A calibration measures for as long as the machine takes, and another process may use it too.
pytestmark = pytest.mark.timeout(900)

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
DRAFT = DraftConfig(target_fingerprint="", tapped_layers=(3,), window=6)
SHAPE = Shape.of(CONFIG)


@dataclass(frozen=True)
class Told(Bench):
    """A bench that runs what it is given once, and is told what its clock says."""

    says: list[float] = field(default_factory=list)

    def seconds(self, work: Callable[[], object]) -> float:
        with torch.inference_mode():
            work()
        return self.says.pop(0)

    def by_turns(self, *works: Callable[[], object]) -> list[float]:
        return [self.seconds(work) for work in works]


def told(*seconds: float) -> Told:
    return Told(torch.device("cpu"), torch.float32, says=list(seconds))


@pytest.fixture(scope="module")
def hasty() -> Iterator[None]:
    """Calibrations take seconds here: each step is short, and what it reads may lie in a processor's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrator, "calibrate", partial(calibrator.calibrate, least_seconds=0.002))
        patch.setattr(microbenchmarks, "_BEYOND_ANY_CACHE", 5 * 2**20)
        yield


@pytest.fixture(scope="module")
def measured(hasty: None) -> tuple[Calibration, list[str]]:
    """A calibration of this machine, and the steps it told of."""
    steps: list[str] = []
    return calibrator.calibrate(CONFIG, DRAFT, begin=steps.append), steps


# --- what is counted --------------------------------------------------------------------------------------------------


def test_products_count_two_flops_for_each_weight_of_a_layer_and_row() -> None:
    norms = 2 * CONFIG.hidden_size
    weights = SHAPE.body_parameters // SHAPE.layers - norms
    table = microbenchmarks.products(CONFIG, told(*[0.5] * 6))
    assert table == tuple((rows, 2 * weights * rows / 0.5) for rows in (1, 4, 16, 64, 256, 1024))


def test_keys_and_values_are_counted_by_the_bytes_of_16_sequences_of_2048(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "_BEYOND_ANY_CACHE", 5 * 2**20)
    one_layer = 16 * 2048 * 2 * 2 * 8 * 4
    read = 2 * one_layer
    cost = microbenchmarks.kv_read_cost(CONFIG, told(0.3, 0.3, 0.5, 0.9))
    assert [cost.at(tokens) * read for tokens in (1, 2, 4, 5, 9, 13)] == pytest.approx([0.3, 0.3, 0.4, 0.5, 0.9, 1.3])


def test_a_target_layer_s_rest_is_a_line_through_one_and_eighty_rows() -> None:
    cost = microbenchmarks.target_layer_cost(CONFIG, told(0.4, 1.2))
    assert cost.at(1) * CONFIG.num_hidden_layers == pytest.approx(0.4)
    assert cost.at(80) * CONFIG.num_hidden_layers == pytest.approx(1.2)


def test_a_fused_targets_layer_rest_is_what_its_products_do_not_explain() -> None:
    matmul = ((1, 1e6),)
    products = [2 * SHAPE.body_parameters * rows / 1e6 for rows in (1, 80)]
    cost = microbenchmarks.fused_target_layer_cost(CONFIG, matmul, 1e12, told(products[0] + 0.4, products[1] + 1.2), 4)
    assert [cost.at(rows) * CONFIG.num_hidden_layers for rows in (1, 80)] == pytest.approx([0.4, 1.2])


def test_a_draft_s_pass_is_what_a_round_takes_beyond_its_own_work() -> None:
    layer, own = microbenchmarks.draft_costs(CONFIG, DRAFT, told(0.1, 0.3, 0.5, 1.1))
    assert (own.at(1), own.at(16)) == pytest.approx((0.1, 0.3))
    assert (4 * layer.at(1), 4 * layer.at(16)) == pytest.approx((0.5 - 0.1, 1.1 - 0.3))


@pytest.mark.parametrize(("vocabulary", "own"), [(300, None), (5000, None), (5000, 64)])
def test_sampling_is_counted_by_logits(vocabulary: int, own: int | None) -> None:
    """5,000 tokens are more than q carries whole, unless the draft proposes only some of them."""
    config = CONFIG.model_copy(update={"vocab_size": vocabulary})
    draft, proposed = DRAFT.model_copy(update={"vocabulary": own}), own or vocabulary
    cost = microbenchmarks.verify_sampling_cost(config, draft, told(0.1, 0.4))
    assert (cost.at(vocabulary), cost.at(80 * vocabulary)) == pytest.approx((0.1, 0.4))
    cost = microbenchmarks.draft_sampling_cost(config, draft, told(0.4, 0.8))
    assert (cost.at(proposed), cost.at(16 * proposed)) == pytest.approx((0.1, 0.2))


def test_noise_never_makes_more_work_cheaper() -> None:
    cost = microbenchmarks.target_layer_cost(CONFIG, told(0.4, 0.2))
    assert cost.at(1) == cost.at(80) == pytest.approx(0.1)


def test_a_model_without_its_layers_holds_no_matrix_but_the_embedding() -> None:
    with torch.device("meta"):
        model = Target(CONFIG)
    model = without_layers(model, 8, torch.bfloat16, torch.device("cpu"))
    assert not [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not None]
    assert {name for name, weight in model.named_parameters() if weight.ndim == 2} == {"embed_tokens.weight"}
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_a_bench_waits_for_what_it_times() -> None:
    calls = []
    bench = Bench(torch.device("cpu"), torch.float32, least_seconds=0.0)
    assert bench.seconds(lambda: calls.append(torch.ones(10).sum())) > 0
    assert len(calls) == 5, "two to warm up, three to count"


def test_a_stream_to_another_process_costs_time_and_leaves_nothing_running() -> None:
    cost = wire_cost()
    assert 1e-6 < cost.fixed < 1
    assert 0 <= cost.each < 1e-6


# --- the record -------------------------------------------------------------------------------------------------------


def test_a_calibration_tells_of_its_steps_and_measures_every_part(measured: tuple[Calibration, list[str]]) -> None:
    found, steps = measured
    assert tuple(steps) == STEPS * PASSES
    assert set(found.matmul) == {"bfloat16", "float32"}
    parts = found.hardware.measured
    assert parts is not None
    assert found.matmul[found.dtype] == parts.target.matmul
    assert min(found.hardware.flops_per_second, found.hardware.bytes_per_second, parts.kv_read.at(1)) > 0
    for cost in (parts.target.layer, parts.draft.layer, parts.target.sampling, parts.draft.sampling, parts.wire):
        assert cost.at(1000) > 0
    assert torch.get_num_threads() == found.machine.threads >= found.machine.draft_threads == 1


def test_a_pass_while_the_machine_was_slow_changes_no_figure(measured: tuple[Calibration, list[str]]) -> None:
    usual = measured[0].hardware.measured
    assert usual is not None
    slow_reads = Curve(tuple((tokens, 1.4 * seconds) for tokens, seconds in usual.kv_read.points))
    slow = replace(usual, kv_read=slow_reads, wire=Cost(2 * usual.wire.fixed, usual.wire.each))
    assert calibrator.medians([usual, slow, usual]) == usual
    assert calibrator.medians([(slow, 3.0), (usual, 1.0), (slow, 2.0)]) == (slow, 2.0)


def test_a_saved_calibration_loads_as_it_was(measured: tuple[Calibration, list[str]], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "calibration.json"
    save(measured[0], file)
    assert load(file) == measured[0]


def test_the_default_file_lies_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_file() == tmp_path / "spire" / "calibration.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_file() == Path.home() / ".cache" / "spire" / "calibration.json"


def test_an_absent_calibration_says_how_to_measure(tmp_path: Path) -> None:
    with pytest.raises(SpireError, match=r"no calibration at .*spire doctor --calibrate"):
        load(tmp_path / "calibration.json")


@pytest.mark.parametrize(("text", "place"), [("{", "its beginning"), ("{}", "measured_at")])
def test_a_foreign_calibration_is_refused(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(SpireError, match=f"no calibration of this version \\({place}\\)"):
        load(file)


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated(
    hasty: None, stories_dir: Path, stories_draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The file that `spire doctor --calibrate` wrote for the small pair, and what it printed."""
    file = tmp_path_factory.mktemp("calibration") / "calibration.json"
    pair = ["--model", str(stories_dir), "--draft", str(stories_draft_dir)]
    arguments = ["doctor", "--calibrate", *pair, "--out", str(file), "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return file, json.loads(result.stdout)


@pytest.mark.skipif(not every_kernels(), reason="no kernels for this processor")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_count_as_many_bytes_as_kernels_read(hasty: None, tmp_path: Path, dtype: torch.dtype) -> None:
    """Of a checkpoint in bfloat16 they are read as such by a float32 model too."""
    save_target(tmp_path, load_target(BUNDLED / "target")[0], dtype)
    arguments = ["doctor", "--calibrate", "--model", str(tmp_path), "--draft", "off", "--dtype", "float32"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "found.json")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    measured = load(tmp_path / "found.json").hardware.measured
    assert measured is not None
    assert measured.target.bytes_per_weight == dtype.itemsize


@pytest.mark.thorough
def test_a_shape_without_a_model_is_calibrated_into_a_file_of_its_own(hasty: None, tmp_path: Path) -> None:
    file = tmp_path / "shape.json"
    shape = ["doctor", "--calibrate", "--shape", "seqax-67m", "--layers", "2"]
    result = CliRunner().invoke(
        app, [*shape, "--out", str(file), "--dtype", "bfloat16", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert (found["target"]["layers"], found["target"]["vocab_size"]) == (2, 32768)
    assert found["dtype"] == "bfloat16"
    refused = CliRunner().invoke(app, shape)
    assert refused.exit_code == 2
    assert "--out" in refused.output


def predicted(file: Path, target: Path, *arguments: str) -> dict[str, Any]:
    command = ["perf-model", "--target", str(target), "--hardware", str(file), "--tau", "3", *arguments, "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_doctor_writes_what_it_prints(calibrated: tuple[Path, dict[str, Any]]) -> None:
    file, printed = calibrated
    assert printed["file"] == str(file)
    assert printed["calibration"] == json.loads(file.read_text())
    assert printed["calibration"]["target"]["vocab_size"] == 512


def test_the_performance_model_predicts_from_a_calibration(
    calibrated: tuple[Path, dict[str, Any]], stories_dir: Path, stories_draft_dir: Path
) -> None:
    report = predicted(calibrated[0], stories_dir, "--draft", str(stories_draft_dir), "--split")
    assert report["hardware"]["measured"]
    assert [row["window"] for row in report["drafts"]] == ["16"], "measured with its own window"
    plain, together, apart = report["deployments"]
    assert plain["tokens_per_second"] > 0
    assert together["wire_ms"] > plain["wire_ms"] > 0
    assert apart["round_ms"] == pytest.approx(max(apart["draft_ms"] + apart["wire_ms"], apart["verify_ms"]))


def test_a_calibration_tells_how_much_memory_its_machine_has(
    calibrated: tuple[Path, dict[str, Any]], stories_dir: Path, stories_draft_dir: Path
) -> None:
    (row,) = predicted(calibrated[0], stories_dir, "--draft", str(stories_draft_dir))["drafts"]
    assert row["fits"]
    assert row["memory_gb"] == memory_limit() / 1e9
    assert row["largest_batch"] > 64


def test_a_calibration_of_another_target_is_used_with_a_note(calibrated: tuple[Path, dict[str, Any]]) -> None:
    result = CliRunner().invoke(app, ["perf-model", "--hardware", str(calibrated[0])], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert "measured at the widths of another target" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", "2"), "was measured as one device"),
        (("--bytes", "1"), "was measured with"),
        (("--window", "paper"), "measured with its own window"),
    ],
)
def test_a_calibration_is_not_stretched(
    calibrated: tuple[Path, dict[str, Any]], arguments: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(app, ["perf-model", "--hardware", str(calibrated[0]), *arguments])
    assert isinstance(result.exception, SpireError | InvalidRequest)
    assert said in str(result.exception)


def test_a_slower_measured_wire_lowers_the_prediction(
    calibrated: tuple[Path, dict[str, Any]], stories_dir: Path, stories_draft_dir: Path, tmp_path: Path
) -> None:
    draft = ("--draft", str(stories_draft_dir))
    found = load(calibrated[0])
    assert found.hardware.measured is not None
    slow = replace(found.hardware.measured, wire=Cost(fixed=600.0))
    save(replace(found, hardware=replace(found.hardware, measured=slow)), tmp_path / "slow.json")
    quick = predicted(calibrated[0], stories_dir, *draft)["drafts"][0]["multiplier"]
    assert predicted(tmp_path / "slow.json", stories_dir, *draft)["drafts"][0]["multiplier"] == pytest.approx(
        3 / 2, rel=0.2
    ), "two trips of ten minutes against one leave τ / 2"
    assert quick > 0
