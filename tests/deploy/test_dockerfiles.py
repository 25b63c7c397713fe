"""The Dockerfiles: hadolint has nothing to say of them, and what they leave to a build can be left to it."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.compose import DEPLOY

DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))


def linted(file: Path) -> str:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    return subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_is_content(file: Path) -> None:
    assert linted(file) == ""


def test_hadolint_sees_a_base_without_a_version(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(DOCKERFILES[0].read_text().replace("FROM ${PYTHON_IMAGE}", "FROM python"))
    assert "DL3006" in linted(file)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_every_base_can_be_replaced_and_has_a_version(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-", text, re.MULTILINE)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_the_last_user_is_not_root(file: Path) -> None:
    assert re.findall(r"^USER (\S+)", file.read_text(), re.MULTILINE)[-1] == "10001:10001"
