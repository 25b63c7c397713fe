"""What takes long is shown from its first second, at a terminal and elsewhere."""

from __future__ import annotations

import pytest

import spire.progress
from spire.progress import bytes_shown, count_shown


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


def test_elsewhere_a_line_says_now_and_then_how_much_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    now = iter([0.0, 10.0, 50.0, 120.0])
    monkeypatch.setattr(spire.progress.time, "monotonic", lambda: next(now))
    with count_shown("draft", 1000, "steps", done=500) as count:  # at 0 s
        count.advance()  # at 10 s
        assert capsys.readouterr() == ("", "")
        count.figures("loss=1.5")
        count.advance(99)  # at 50 s
        assert capsys.readouterr().err == "draft: 600 of 1,000 steps, about 3.3 min left, loss=1.5\n"
        count.advance()  # at 120 s
    assert capsys.readouterr().err == "draft: 601 of 1,000 steps, about 7.9 min left, loss=1.5\n"


def test_a_terminal_shows_the_figures_beside_the_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with count_shown("draft", 1000, "steps") as count:
        count.figures("loss=1.5")
        count.advance(1000)
    shown = capsys.readouterr().err
    assert "1,000/1,000 steps" in shown
    assert "loss=1.5" in shown
