"""The command line by itself: help, and errors that say what to do. With services running: tests/system/test_up.py."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from spire.checkpoints.weights import save_target
from spire.cli import app, main
from spire.model.backends.placed import computed_by
from spire.model.config import ModelConfig, load_model_config
from spire.model.placement import choose_device, choose_dtype
from spire.model.target import Target
from spire.training.draft import DraftRecipe
from spire.training.target import TargetRecipe
from tests.conftest import FIXTURES
from tests.untrained import untrained_draft


def commands(command: Any, name: str = "spire") -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, found in getattr(command, "commands", {}).items():
        yield from commands(found, f"{name} {child}")


COMMANDS = dict(commands(typer.main.get_command(app)))


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and everything printed by `spire ...`, through its real entry point."""
    monkeypatch.setattr("sys.argv", ["spire", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    silent = [p.name for p in command.params if not getattr(p, "help", None)]
    assert not silent


def test_the_design_s_commands_exist() -> None:
    wanted = {
        "spire up",
        "spire complete",
        "spire doctor",
        "spire convert llama2c",
        "spire train target",
        "spire train draft",
    }
    assert wanted <= COMMANDS.keys()


@pytest.mark.parametrize(("name", "recipe"), [("target", TargetRecipe), ("draft", DraftRecipe)])
def test_every_value_of_a_recipe_is_an_option(name: str, recipe: type) -> None:
    options = {p.name for p in COMMANDS[f"spire train {name}"].params}
    assert {field.name for field in fields(recipe)} <= options


def test_options_can_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIRE_COMPLETE_URL", "http://127.0.0.1:9")
    result = CliRunner().invoke(app, ["complete", "hello"])
    assert "http://127.0.0.1:9" in str(result.exception)


WAITING = """
import os, signal, sys, time
from spire.cli import app, main

@app.command("wait")
def wait() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("told what was measured")

sys.argv = ["spire", "wait"]
main()
"""


def test_a_command_that_sigterm_ends_still_tells_what_it_has() -> None:
    ended = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "told what was measured\n"), ended.stderr


def test_complete_without_a_gateway_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in ([], ["--no-stream"], ["--json"]):
        code, printed = run(["complete", "hi", "--url", "http://127.0.0.1:9", *more], capsys, monkeypatch)
        assert code == 1
        assert "no gateway at http://127.0.0.1:9: start one with 'spire up'" in printed


def test_up_names_a_missing_model_and_draft(
    stories_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = str(tmp_path / "absent")
    code, printed = run(["up", "--model", absent], capsys, monkeypatch)
    assert code == 1
    assert f"{absent}/config.json does not exist" in printed
    code, printed = run(["up", "--model", str(stories_dir), "--draft", absent], capsys, monkeypatch)
    assert code == 1
    assert f"{absent}/config.json does not exist" in printed


def test_up_refuses_a_directory_that_is_no_draft(
    stories_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed = run(["up", "--model", str(stories_dir), "--draft", str(stories_dir)], capsys, monkeypatch)
    assert code == 1
    assert "this directory is no draft" in printed


def test_up_says_that_the_port_is_taken(
    stories_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["up", "--model", str(stories_dir), "--draft", "off", "--port", str(port)]
        code, printed = run(arguments, capsys, monkeypatch)
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in printed
    assert "--port" in printed


def test_convert_writes_a_directory_that_doctor_finds_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FIXTURES / "stories260K"
    arguments = ["--tokenizer", str(source / "tok512.model"), "--out", str(tmp_path / "model")]
    code, printed = run(["convert", "llama2c", str(source / "stories260K.bin"), *arguments], capsys, monkeypatch)
    assert code == 0
    assert f"spire up --model {tmp_path / 'model'}" in printed
    assert load_model_config(tmp_path / "model").vocab_size == 512

    arguments = ["--model", str(tmp_path / "model"), "--url", "http://127.0.0.1:9", "--json"]
    code, printed = run(["doctor", *arguments], capsys, monkeypatch)
    report = json.loads(printed)
    assert (code, report["ok"]) == (0, True)
    checks = {check["name"]: check["value"] for check in report["checks"]}
    assert {"python", "torch", "device", "bfloat16", "kernels", "target"} <= checks.keys()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_doctor_says_what_of_target_and_draft_is_left_to_torch(
    model_type: str,
    stories_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32}
    config = ModelConfig(model_type=model_type, num_attention_heads=2, num_key_value_heads=1, **sizes)
    save_target(tmp_path / "target", Target(config), torch.float32)
    shutil.copy(stories_dir / "tokenizer.json", tmp_path / "target")
    untrained_draft(tmp_path / "target", tmp_path / "draft", layers=(1, 2))
    pair = ["--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    code, printed = run(["doctor", *pair, "--url", "http://127.0.0.1:9", "--json"], capsys, monkeypatch)
    assert code == 0, printed
    checks = {check["name"]: check["value"] for check in json.loads(printed)["checks"]}
    device = choose_device("auto")
    computing = computed_by(config, device, choose_dtype("auto", device))
    assert checks["target's kernels"] == checks["draft's kernels"] == computing
    if model_type == "qwen3":
        assert "torch's own" in computing


def test_doctor_fails_and_names_a_truncated_checkpoint(
    stories_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text((stories_dir / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((stories_dir / "model.safetensors").read_bytes()[:1000])
    arguments = ["--model", str(tmp_path), "--url", "http://127.0.0.1:9", "--json"]
    code, printed = run(["doctor", *arguments], capsys, monkeypatch)
    assert code == 1
    target = next(check for check in json.loads(printed)["checks"] if check["name"] == "target")
    assert not target["ok"]
    assert "model.safetensors cannot be read" in target["advice"]


@pytest.mark.parametrize("content", [None, "not a tokenizer"])
def test_doctor_fails_without_a_tokenizer_that_can_be_read(
    content: str | None,
    stories_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`spire up` refuses such a model."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((stories_dir / name).read_bytes())
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    arguments = ["--model", str(tmp_path), "--draft", "off", "--url", "http://127.0.0.1:9", "--json"]
    code, printed = run(["doctor", *arguments], capsys, monkeypatch)
    assert code == 1
    (told,) = [check for check in json.loads(printed)["checks"] if not check["ok"]]
    assert told["name"] == "tokenizer"
    assert "tokenizer.json" in told["value"] + told["advice"]


def test_training_says_what_is_wrong_with_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "target", "--data", str(tmp_path / "absent"), "--out", str(tmp_path / "out"), "--no-compile"]
    code, printed = run(arguments, capsys, monkeypatch)
    assert code == 1
    assert "absent does not exist" in printed


def test_a_pair_trained_from_the_command_line_belongs_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    size = [
        "--steps",
        "2",
        "--tokens-per-step",
        "64",
        "--short-length",
        "16",
        "--long-length",
        "32",
        "--device",
        "cpu",
        "--no-compile",
    ]
    shape = ["--vocab-size", "300", "--hidden-size", "16", "--intermediate-size", "24", "--layers", "3", "--heads", "2"]
    data = ["--data", str(FIXTURES / "text" / "jowett_charmides.txt")]
    monkeypatch.setattr("sys.argv", ["spire", "train", "target", *data, "--out", target, *size, *shape])
    with pytest.raises(SystemExit, match="0"):
        main()
    monkeypatch.setattr(
        "sys.argv", ["spire", "train", "draft", *data, "--target", target, "--out", draft, *size, "--window", "8"]
    )
    with pytest.raises(SystemExit, match="0"):
        main()
    capsys.readouterr()
    arguments = ["doctor", "--model", target, "--draft", draft, "--url", "http://127.0.0.1:9", "--json"]
    code, printed = run(arguments, capsys, monkeypatch)
    assert code == 0, printed
    assert "window 8" in printed


def test_doctor_names_a_draft_of_another_target(
    stories_dir: Path,
    stories_draft_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = json.loads((stories_draft_dir / "config.json").read_text())
    config["spire_draft"]["target_fingerprint"] = "0123456789abcdef"
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [
        "doctor",
        "--model",
        str(stories_dir),
        "--draft",
        str(tmp_path),
        "--url",
        "http://127.0.0.1:9",
        "--json",
    ]
    code, printed = run(arguments, capsys, monkeypatch)
    assert code == 1
    assert "it was trained for target 0123456789abcdef" in printed


@pytest.mark.parametrize(
    ("given", "vocabulary", "compiled"),
    [([], None, True), ([], 64, False), (["--compile"], 64, True), (["--no-compile"], None, False)],
)
def test_a_draft_for_a_large_vocabulary_is_not_compiled_on_a_cpu(
    given: list[str], vocabulary: int | None, compiled: bool, stories_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executions: list[Any] = []
    monkeypatch.setattr("spire.training.draft.train_draft", lambda *arguments: executions.append(arguments[-1]))
    own = [] if vocabulary is None else ["--vocabulary", str(vocabulary)]
    command = ["train", "draft", "--device", "cpu", "--target", str(stories_dir), "--data", "a.txt", "--out", "o"]
    assert CliRunner().invoke(app, [*command, *own, *given]).exit_code == 0
    assert executions[0].compiled == compiled


def test_a_seed_below_zero_is_refused_by_name(tmp_path: Path) -> None:
    command = ["train", "target", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--seed", "-1"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "--seed" in done.output
