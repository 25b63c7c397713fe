"""The page's files: all of them are served, and all of them are in the package that is installed."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from gateway.http.page import PATHS
from tests.paths import ROOT
from tests.services import Services

FILES = sorted((ROOT / "gateway" / "http" / "static").iterdir())


def test_every_file_is_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["gateway.http"]
    assert len(FILES) > 3
    assert [file for file in FILES if not any(fnmatch(f"static/{file.name}", pattern) for pattern in patterns)] == []


def test_every_file_is_served_as_what_it_is(services: Services) -> None:
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for file in FILES:
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        answer = httpx.get(services.url + path)
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].split(";")[0] == types[file.suffix]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert httpx.head(services.url + path).status_code == 200
        assert httpx.post(services.url + path).status_code == 405
    assert len(PATHS) == len(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_names_another_host(file: Path) -> None:
    links = re.findall(r"https?://[^\s\"')]+", file.read_text())
    assert [link for link in links if link != "http://www.w3.org/2000/svg"] == []
