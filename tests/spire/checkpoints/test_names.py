"""A model's name is what people call it, also where a cache keeps it under a hash."""

from __future__ import annotations

from pathlib import Path

from spire.checkpoints.names import model_name


def test_a_directory_gives_its_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert model_name(tmp_path / "my-model" / ".") == "my-model"


def test_a_snapshot_of_a_cache_gives_the_name_that_was_asked_for(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0e9e39f249a16976918f6564b8830bc894c89659"
    snapshot.mkdir(parents=True)
    assert model_name(snapshot) == "meta-llama/Llama-3.1-8B"


def test_a_directory_called_snapshots_elsewhere_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "may").mkdir(parents=True)
    assert model_name(tmp_path / "snapshots" / "may") == "may"
