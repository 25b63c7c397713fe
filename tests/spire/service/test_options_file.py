"""spire.toml: one place for options, below the environment and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.config import GatewayConfig
from spire.cli import app, main
from spire.errors import SpireError
from spire.service.options_file import read_options


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "options.toml"
    file.write_text("[gateway]\nk = 7\n[up]\nport = 9123\n")
    monkeypatch.setenv("SPIRE_CONFIG", str(file))
    return file


def test_environment_comes_before_file_and_file_before_default(options: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GatewayConfig().k == 7
    monkeypatch.setenv("SPIRE_GATEWAY_K", "3")
    assert GatewayConfig().k == 3
    options.write_text("")
    monkeypatch.delenv("SPIRE_GATEWAY_K")
    assert GatewayConfig().k is None


def test_commands_read_it_too(options: Path) -> None:
    shown = CliRunner().invoke(app, ["up", "--help"], default_map=read_options())
    assert "9123" in shown.output


def test_a_misspelt_option_is_refused_by_name(options: Path) -> None:
    options.write_text("[gateway]\nmax_bach = 7\n")
    result = subprocess.run([sys.executable, "-m", "gateway"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "max-bach" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[gateway\n", "is not valid TOML"),
        ("\xff", "is not valid TOML"),
        ("gateway = 3\n", "gateway is no table"),
        ("[[gateway]]\nk = 3\n", "gateway is no table"),
    ],
)
def test_a_service_names_a_file_that_it_cannot_use(options: Path, content: str, told: str) -> None:
    options.write_text(content, encoding="latin-1")
    result = subprocess.run([sys.executable, "-m", "gateway"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("gateway: ")
    assert f"{options}" in result.stderr
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[up]\nmax-context = 7\n", "[up], has max-context, which is not known: did you mean max_context?"),
        ("[upp]\n", "has upp, which is not known: did you mean up?"),
        ("[train]\ndraft = 3\n", "[train], has draft, which is no table"),
        ("port = 9000\n", "port is no table"),
    ],
)
def test_a_command_refuses_options_that_it_would_ignore(
    options: Path, content: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options.write_text(content)
    monkeypatch.setattr(sys, "argv", ["spire", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert told in capsys.readouterr().err


def test_options_of_all_commands_and_services_are_known(
    options: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options.write_text("[up]\nmax_context = 7\n[train.draft]\nk = 3\n[perf-model]\n[verifier]\nmax_sequences = 1\n")
    monkeypatch.setattr(sys, "argv", ["spire", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("spire ")


@pytest.mark.parametrize("content", ["[gateway\n", "\xff"])
def test_a_file_that_is_not_toml_is_named(options: Path, content: str) -> None:
    options.write_text(content, encoding="latin-1")
    with pytest.raises(SpireError, match=r"options\.toml is not valid TOML"):
        read_options()


def test_a_named_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIRE_CONFIG", "nowhere.toml")
    with pytest.raises(SpireError, match=r"nowhere\.toml, which does not exist"):
        read_options()
