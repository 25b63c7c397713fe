"""spire.toml: one place for options, below the environment and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.config import GatewayConfig
from spire.cli import app
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


@pytest.mark.parametrize("content", ["[gateway\n", "\xff"])
def test_a_file_that_is_not_toml_is_named(options: Path, content: str) -> None:
    options.write_text(content, encoding="latin-1")
    with pytest.raises(SpireError, match=r"options\.toml is not valid TOML"):
        read_options()


def test_a_named_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIRE_CONFIG", "nowhere.toml")
    with pytest.raises(SpireError, match=r"nowhere\.toml, which does not exist"):
        read_options()
