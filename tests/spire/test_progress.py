"""What takes long is shown from its first second, at a terminal and elsewhere."""

from __future__ import annotations

import pytest

from spire.progress import bytes_shown


def test_a_terminal_shows_a_bar_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with bytes_shown("tokenizing", 3_000_000) as told:
        assert "tokenizing" in capsys.readouterr().err
        told(3_000_000)
    assert "3.0/3.0 MB" in capsys.readouterr().err


def test_elsewhere_a_line_says_what_begins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with bytes_shown("tokenizing", 3_000_000) as told:
        told(3_000_000)
        assert capsys.readouterr().err == "tokenizing: 3 MB to read\n"
    assert capsys.readouterr() == ("", "")


def test_what_takes_a_moment_is_not_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with bytes_shown("tokenizing", 30_000) as told:
        told(30_000)
    assert capsys.readouterr() == ("", "")
