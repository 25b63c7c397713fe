"""Files and directories are whole or absent, whoever else makes them at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from spire.errors import DataError
from spire.files import made_once, write_whole


def writes(text: str, directory: Path) -> None:
    directory.mkdir()
    (directory / "made").write_text(text)


def test_of_two_that_make_a_directory_the_first_to_finish_wins(tmp_path: Path) -> None:
    def second(unfinished: Path) -> None:
        made_once(tmp_path / "kept", lambda path: writes("first", path))
        writes("second", unfinished)

    assert made_once(tmp_path / "kept", second) == tmp_path / "kept"
    assert (tmp_path / "kept" / "made").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_directory_whose_making_is_interrupted_is_not_there(tmp_path: Path) -> None:
    def interrupted(unfinished: Path) -> None:
        writes("half", unfinished)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(tmp_path / "kept", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/kept cannot be written \(File exists\): .*XDG_CACHE_HOME"):
        made_once(tmp_path / "file" / "kept", lambda path: writes("", path))


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    def interrupted(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "file").write_text("whole")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", interrupted)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "whole")]
