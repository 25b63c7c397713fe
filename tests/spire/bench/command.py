"""The command, run within the tests."""

from __future__ import annotations

from typer.testing import CliRunner

from spire.cli import app


def bench(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False, env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout
