"""The committed `spire/v1` is what protoc writes from `protos/` today: `make protos` after every change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT


def test_committed_stubs_equal_regenerated_ones(tmp_path: Path) -> None:
    protos = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "protos/spire/v1").glob("*.proto"))
    assert protos
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *outputs, *protos], cwd=ROOT, check=True)
    made = {file.name: file.read_text() for file in (tmp_path / "spire/v1").iterdir()}
    committed = {file.name: file.read_text() for file in (ROOT / "spire/v1").glob("*_pb2*")}
    assert committed.keys() == made.keys()
    assert [name for name in made if made[name] != committed[name]] == []
